"""Make the stored layers that predict further tokens in tests/data/mtp, and torch's answers.

    python scripts/make_mtp_references.py [CASE ...]

Needs torch and transformers, which has the layers' parts and leaves the layers themselves out. They
are put together here as vLLM and SGLang do it (deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py,
qwen3_next_mtp.py, qwen3_5_mtp.py of the one, deepseek_nextn.py of the other): the hidden state of
the model after its last norm and the next token's embedding, each through a norm; the embedding
first (MiMo's second), a projection of both; transformers' own decoder layer; a norm, whose result
stands for the next hidden state; and the model's head. Each case is one of tests/data/models; its
folder has

mtp.safetensors  the layer, with random weights, as published checkpoints have it beside the rest
reference.npz    logits        float32 [8, vocab], after the last tokens of the case's prompt
                 ids           int64 [4], tokens that come then
                 next_logits   float32 [4, vocab], after each of them: the layer goes on by itself

Everything is computed in float32, from weights as the files round them.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from make_references import DATA as MODELS
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

DATA = MODELS.parent / "mtp"
LAST, NEXT = 8, 4


@dataclass(frozen=True)
class Names:
    """The names of the parts of a layer in a checkpoint."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str


NEXTN = Names("{}", "{}.eh_proj", "{}.enorm", "{}.hnorm", "{}.shared_head.norm")
QWEN = Names(
    "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
)
MIMO = Names(
    *("model.mtp_layers.0" + part for part in ("", ".input_proj", ".token_layernorm")),
    *("model.mtp_layers.0" + part for part in (".hidden_layernorm", ".final_layernorm")),
)


@dataclass(frozen=True)
class Case:
    """A model with a predicting layer. less: the number that must be added to stored weights of
    norms to get the factors."""

    module: str
    layer: str
    names: Names = NEXTN
    less: float = 0.0


CASES = {
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3DecoderLayer"),
    "glm4_moe": Case("glm4_moe", "Glm4MoeDecoderLayer"),
    "glm4_moe_lite": Case("glm4_moe_lite", "Glm4MoeLiteDecoderLayer"),
    "mimo": Case("qwen2", "Qwen2DecoderLayer", MIMO),
    "qwen3_next": Case("qwen3_next", "Qwen3NextDecoderLayer", QWEN, 1.0),
    "qwen3_5_text": Case("qwen3_5", "Qwen3_5DecoderLayer", QWEN, 1.0),
    "qwen3_5_moe_text": Case("qwen3_5_moe", "Qwen3_5MoeDecoderLayer", QWEN, 1.0),
}


class Predictor:
    """The layer behind a model, with random weights."""

    def __init__(self, name: str) -> None:
        case, self.folder = CASES[name], MODELS / name
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self.config = self.model.config
        index = config.num_hidden_layers
        if case.names is MIMO:
            index = 0
        elif case.names is QWEN:
            index = config.layer_types.index("full_attention")
        elif getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        own = import_module(f"transformers.models.{case.module}.modeling_{case.module}")
        self.layer = getattr(own, case.layer)(config, index).float().eval()
        prefix = f"model.layers.{config.num_hidden_layers}"
        self.names = case.names
        if self.names is NEXTN:
            self.names = Names(*(part.format(prefix) for part in vars(NEXTN).values()))
        self.less, self._random = case.less, np.random.default_rng(3)
        self.tensors: dict[str, torch.Tensor] = {}
        for key, value in self.layer.state_dict().items():
            with torch.no_grad():
                value.copy_(self._tensor(f"{self.names.layer}.{key}", tuple(value.shape)))
        width = config.hidden_size
        for norm in (self.names.embedding_norm, self.names.hidden_norm, self.names.norm):
            self._tensor(f"{norm}.weight", (width,))
        self._tensor(f"{self.names.projection}.weight", (width, 2 * width))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Make random values, and store them under this name."""
        if len(shape) > 1:
            values = self._random.normal(0, shape[-1] ** -0.5, shape)
        elif "norm" in name:
            values = self._random.uniform(0.5, 1.5, shape) - self.less
        else:
            values = self._random.normal(0, 0.2, shape)
        self.tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
        return self.tensors[name]

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """Returns the model's hidden states after its last norm, [tokens, hidden_size]."""
        with torch.no_grad():
            found: Any = self.model.model(torch.tensor([ids]), use_cache=False)
        return found.last_hidden_state[0]

    def predict(self, hidden: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden[t] and ids[t], the token after it -> what stands for hidden states, logits."""
        model = self.model
        with torch.no_grad():
            e = self._norm(model.model.embed_tokens(torch.tensor(ids)), self.names.embedding_norm)
            parts = e, self._norm(hidden, self.names.hidden_norm)
            both = torch.cat(parts[::-1] if self.names is MIMO else parts, -1)
            x = (both @ self.tensors[f"{self.names.projection}.weight"].float().T)[None]
            positions = torch.arange(len(ids))[None]
            rope = model.model.rotary_emb(x, positions)
            mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
            x = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            g = self._norm(x.reshape(-1, x.shape[-1]), self.names.norm)
            return g, model.lm_head(g)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (self.tensors[f"{name}.weight"].float() + self.less)


def reference(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a case, and the arrays that are stored with them."""
    predictor = Predictor(name)
    with np.load(predictor.folder / "reference.npz") as arrays:
        tokens = arrays["prompt_ids"].tolist()
    states = predictor.hidden(tokens)
    _, logits = predictor.predict(states[:-1], tokens[1:])
    vocab = predictor.config.vocab_size
    ids = [(tokens[-1] * 7 + 31 * i) % vocab for i in range(NEXT)]
    next_logits = []
    for i in range(NEXT):
        g, found = predictor.predict(states, [*tokens[1:], *ids[: i + 1]])
        next_logits.append(found[-1])
        states = torch.cat([states, g[-1:]])
    arrays = {"logits": logits[-LAST:].numpy(), "ids": np.array(ids)}
    return predictor.tensors, arrays | {"next_logits": torch.stack(next_logits).numpy()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the stored layers of multi-token prediction")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    for name in parser.parse_args().cases or CASES:
        tensors, arrays = reference(name)
        folder = DATA / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "mtp.safetensors")
        np.savez_compressed(folder / "reference.npz", **arrays)


if __name__ == "__main__":
    main()
