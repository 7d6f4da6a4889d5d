"""Layers that predict further tokens, as the draft: against torch, and answers are those without.

The reference puts transformers' own decoder layers together as vLLM and SGLang do (deepseek_mtp.py,
glm4_moe_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py; deepseek_nextn.py), as transformers itself reads
none of these layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import build_engine
from marks import others_full
from numpy.typing import NDArray
from reference_models import TOLERANCE, load, relative_error
from test_draft import drafts_of, same
from test_speculation import WAYS, params_of, plainly, prompts_of, run

import infer
from infer.engine.engine import Engine
from infer.hub import resolve
from infer.kernels.errors import RequestError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.record import run as run_dispatches
from infer.kernels.state.kv_cache import PAGE
from infer.kernels.state.step import pack_drafting, pack_step
from infer.models import open_model
from infer.models.blocks.mtp import Predictor

# By case: the module of transformers, and its layer; the names of the parts of ours.
CASES = {
    "glm4_moe": ("glm4_moe", "Glm4MoeDecoderLayer"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3DecoderLayer"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteDecoderLayer"),
    "qwen3_next": ("qwen3_next", "Qwen3NextDecoderLayer"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5DecoderLayer"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeDecoderLayer"),
}


def predictor_of(case: str) -> Predictor:
    predictor = open_model(load_folder(case))[0].predictor
    assert isinstance(predictor, Predictor)
    return predictor


def load_folder(case: str) -> Path:
    return Path(__file__).parent / "data" / "models" / case


class Reference:
    """The layer in torch, with random weights."""

    def __init__(self, case: str) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        from importlib import import_module

        self.torch, self.case = torch, case
        module, cls = CASES[case]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            load_folder(case), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self.config = self.model.config
        own = import_module(f"transformers.models.{module}.modeling_{module}")
        index = config.num_hidden_layers
        types = getattr(config, "layer_types", None)
        if types is not None and "full_attention" in types and module.startswith("qwen"):
            index = types.index("full_attention")
        else:
            config.mlp_layer_types = [*(getattr(config, "mlp_layer_types", None) or []), "sparse"]
        self.layer = getattr(own, cls)(config, index).float().eval()
        predictor = predictor_of(case)
        self.names, less = predictor.names, predictor.added
        rng = np.random.default_rng(3)
        hidden = config.hidden_size

        def norm(width: int) -> NDArray[np.float32]:
            return rng.uniform(0.5, 1.5, width).astype(np.float32)

        with torch.no_grad():
            for name, value in self.layer.state_dict().items():
                if value.ndim == 1 and "norm" in name:
                    new = norm(value.shape[0]) - less
                elif value.ndim == 1:
                    new = rng.normal(0, 0.2, value.shape)
                else:
                    new = rng.normal(0, value.shape[-1] ** -0.5, value.shape)
                value.copy_(torch.from_numpy(np.asarray(new, np.float32)))
        self.norms = {
            name: norm(hidden)
            for name in (self.names.embedding_norm, self.names.hidden_norm, self.names.norm)
        }
        self.projection = rng.normal(0, (2 * hidden) ** -0.5, (hidden, 2 * hidden)).astype(
            np.float32
        )
        self.less = less

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """As a checkpoint has them."""
        found = {f"{self.names.layer}.{n}": v.numpy() for n, v in self.layer.state_dict().items()}
        found |= {f"{name}.weight": value - self.less for name, value in self.norms.items()}
        return found | {f"{self.names.projection}.weight": self.projection}

    def write_checkpoint(self, folder: Path) -> Path:
        from safetensors.numpy import save_file

        load(self.case).write_checkpoint(folder, "transformers5")
        (file,) = folder.glob("*.safetensors")
        save_file(self.tensors(), folder / "mtp.safetensors")
        from safetensors import safe_open

        weights = {}
        for own in (file, folder / "mtp.safetensors"):
            with safe_open(own, "np") as opened:
                weights |= dict.fromkeys(opened.keys(), own.name)
        file.rename(folder / "main.safetensors")
        weights = {n: "main.safetensors" if f == file.name else f for n, f in weights.items()}
        index = {"metadata": {}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def hidden(self, ids: Sequence[int]) -> Any:
        """Of the model, after its last norm."""
        torch = self.torch
        with torch.no_grad():
            return self.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]

    def predict(self, hidden: Any, ids: Sequence[int]) -> tuple[Any, Any]:
        """hidden[t] and ids[t], the token after it -> hidden states after the norm, logits."""
        torch, model = self.torch, self.model

        def norm(x: Any, name: str) -> Any:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
            return x * scale * torch.from_numpy(self.norms[name])

        with torch.no_grad():
            e = norm(model.model.embed_tokens(torch.tensor(list(ids))), self.names.embedding_norm)
            both = torch.cat([e, norm(hidden, self.names.hidden_norm)], -1)
            x = (both @ torch.from_numpy(self.projection).T)[None]
            positions = torch.arange(x.shape[1])[None]
            rope = model.model.rotary_emb(x, positions)
            mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
            x = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            g = norm(x.reshape(-1, x.shape[-1]), self.names.norm)
            return g, model.lm_head(g)


def engine_with(device: Device, folder: Path, **options: Any) -> Engine:
    return build_engine(device, folder, predicts=True, **{"speculate": "draft"} | options)


def prefill(engine: Engine, ids: Sequence[int]) -> None:
    for start, rows, kind in engine.chunks(len(ids)):
        engine.device.write(engine.steps.step, pack_step(ids[start : start + rows], start))
        plan = engine.steps.plan(kind, False)
        run_dispatches(engine.device, plan.body, rows, start + rows)


def draft(engine: Engine, token: int, position: int) -> NDArray[np.float32]:
    assert engine.draft is not None
    steps = engine.draft.steps
    engine.device.write(steps.step, pack_drafting([(0, token, position, 0, 1, 0)], 1, behind=False))
    plan = steps.plan("decode", False)
    run_dispatches(engine.device, [*plan.body, *plan.head], 1, position + 1)
    return engine.device.read(steps.logits).view(np.float32)[: engine.vocab_size].copy()


@pytest.mark.parametrize("case", CASES)
def test_logits(device: Device, case: str, tmp_path: Path) -> None:
    reference = Reference(case)
    folder = reference.write_checkpoint(tmp_path / case)
    ids = load(case).prompt_ids.tolist()
    hidden = reference.hidden(ids)
    _, expected = reference.predict(hidden[:-1], ids[1:])
    with device.scope():
        engine = engine_with(device, folder, prefill_chunk=16)
        with engine.alone():
            prefill(engine, ids)
            for position in range(len(ids) - 1, len(ids) - 9, -1):
                logits = draft(engine, ids[position], position)
                assert relative_error(logits, expected[position - 1].numpy()) <= TOLERANCE
            prefill(engine, ids)
            tokens, states = list(ids), hidden
            for _ in range(4):  # what it says itself goes on
                tokens.append((tokens[-1] * 7 + 3) % engine.vocab_size)
                g, expected = reference.predict(states, tokens[1:])
                logits = draft(engine, tokens[-1], len(tokens) - 1)
                assert relative_error(logits, expected[-1].numpy()) <= TOLERANCE
                states = reference.torch.cat([states, g[-1:]])


# Answers


@pytest.fixture(scope="module")
def built(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """The engine of a checkpoint with such a layer."""
    made: dict[tuple[Any, ...], Engine] = {}

    def build(case: str, **options: Any) -> Engine:
        key = case, *sorted(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("mtp") / case
            Reference(case).write_checkpoint(folder)
            made[key] = engine_with(own_device, folder, **{"max_batch": 4} | options)
        made[key].forget()
        return made[key]

    return build


@others_full("case", CASES, ["glm4_moe", "qwen3_next"])
def test_answers_are_those_without_drafts(built: Callable[..., Engine], case: str) -> None:
    engine, prompts = built(case), prompts_of(case)
    params = [params_of(way, logprobs=2) for way in [*WAYS, *WAYS]]
    expected = plainly(engine, prompts, params)
    found = run(engine, prompts, params)
    same(found, expected)
    assert drafts_of(found)[0] > 20
    stats = engine.pool.stats
    assert (stats.in_use, stats.cached + stats.free) == (0, engine.options.pages)


COUNT = 64  # tokens of a model that counts


@pytest.fixture(scope="module")
def counting(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """It says the number after the last token's; its layer that after the hidden state's, and one
    more: what of all its rows has the hidden state of another row drafts wrong tokens."""
    from safetensors.numpy import save_file

    reference = Reference("glm4_moe")
    folder = tmp_path_factory.mktemp("mtp") / "counts"
    load("glm4_moe").write_checkpoint(folder, "transformers5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": COUNT}))
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    tensors = {n: v.float().numpy() for n, v in reference.model.state_dict().items()}
    tensors |= reference.tensors()
    one, after = np.eye(COUNT, dtype=np.float32), np.roll(np.eye(COUNT, dtype=np.float32), 1, 0)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] = np.zeros_like(value)
        elif "norm" in name and value.shape == (COUNT,):
            tensors[name] = np.ones_like(value)
    tensors["model.embed_tokens.weight"] = one
    tensors["lm_head.weight"] = after
    tensors[f"{reference.names.projection}.weight"] = np.hstack([0 * one, after])
    save_file(tensors, folder / "model.safetensors")
    return engine_with(own_device, folder, max_batch=4, context=4 * PAGE, prefill_chunk=32)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_each_draft_is_from_the_hidden_state_before_it(counting: Engine, way: str) -> None:
    """Alone and in a batch, over chunks and pages, and from what is cached, whole pages and a part
    of one."""
    counting.forget()
    params = params_of(way, max_tokens=40)
    prompts = [[5, 6, 7], [(3 + i) % COUNT for i in range(PAGE + 9)], [9]]
    prompts += [[*prompts[1], *[(12 + i) % COUNT for i in range(PAGE)]], prompts[1][:20]]
    found = run(counting, prompts[:1], params)
    found += run(counting, prompts[1:3], params)
    found += run(counting, prompts[3:], params)
    for prompt, own in zip(prompts, found, strict=True):
        assert own.ids == [(prompt[-1] + 1 + i) % COUNT for i in range(40)]
    reused = [own.answer.timings.reused_tokens for own in found if own.answer is not None]
    assert reused[3] > PAGE
    assert 0 < reused[4] < PAGE
    drafted, right = drafts_of(found)
    assert right == drafted > 120


@others_full("case", CASES, ["glm4_moe", "qwen3_next"])
def test_keys_are_those_of_a_prompt_that_is_not_cached(
    built: Callable[..., Engine], case: str
) -> None:
    """Where some of it is, the hidden state before the rest is computed again, or was saved."""
    engine, ids = built(case), load(case).prompt_ids.tolist()

    def keys(prompt: Sequence[int]) -> tuple[NDArray[Any], int]:
        answer = engine.generate(prompt, params_of("greedy", max_tokens=4))
        next(answer)
        cache = engine.steps.predicted
        assert cache is not None
        slots = np.array([p * PAGE + np.arange(PAGE) for p in answer.sequence.pages]).reshape(-1)
        found = engine.device.read(cache.keys).view(np.float32).reshape(cache.slots, -1)
        answer.close()
        engine.settle()
        return found[slots[: len(prompt)]].copy(), answer.timings.reused_tokens

    prompt = [*ids, *ids[5:], 9, 8, 7, *ids[:15]]
    expected, reused = keys(prompt)
    assert reused == 0
    engine.forget()
    keys(prompt[: len(prompt) - 9])
    found, reused = keys(prompt)
    assert reused > PAGE
    np.testing.assert_allclose(found, expected, atol=1e-4)


# From a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with such a layer and the demo model's tokenizer."""
    from safetensors.numpy import save_file

    reference = Reference("glm4_moe")
    folder = tmp_path_factory.mktemp("mtp") / "predicts"
    shutil.copytree(resolve("demo").path, folder, ignore=shutil.ignore_patterns("draft", "*.safe*"))
    config = json.loads((load_folder("glm4_moe") / "config.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    tensors = {n: v.float().numpy() for n, v in reference.model.state_dict().items()}
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = rng.normal(0, 0.5, (size, config["hidden_size"])).astype(np.float32)
    save_file(tensors | reference.tensors(), folder / "model.safetensors")
    return folder


def test_it_is_read_where_it_drafts(folder: Path) -> None:
    def load_and_ask(**options: Any) -> tuple[str, int, int]:
        with infer.load(folder, context=64, max_batch=1, **options) as llm:
            result = llm.generate("Once upon", max_tokens=8, temperature=0.0)
            memory = llm.engine.stats().memory.allocated
            return result.text, result.timings.drafted_tokens, memory

    off, mtp = load_and_ask(), load_and_ask(speculate="mtp")
    assert off[0] == mtp[0]
    assert off[1] == 0 < mtp[1]
    assert load_and_ask(speculate="lookup")[2] < mtp[2]


def test_what_has_no_such_layer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="demo has no layer that predicts further tokens"):
        infer.load("demo", speculate="mtp")
    with pytest.raises(RequestError, match="speculate is mtp, and a draft model"):
        infer.load("demo", speculate="mtp", draft="demo-draft")
