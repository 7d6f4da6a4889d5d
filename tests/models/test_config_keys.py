"""Keys of config.json mean what transformers takes them for: those left out, and others.

The default run compares with the table of scripts/make_config_references.py; the live one with
transformers itself, by its logits.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import places
import pytest
from engines import build_engine, scores
from reference_models import CONFIG_FILES, DATA, relative_error

from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.device import Device
from infer.models import ARCHITECTURES, MULTIMODAL, build_model
from infer.models.blocks.multimodal import text_config
from infer.models.blocks.rope import rope_table, score_factor
from infer.models.loading.config import RawConfig, RopeConfig

ROOT = places.ROOT
TABLE = json.loads((DATA.parent / "config_defaults.json").read_text())
TOLERANCE = 1e-4
POSITIONS, LONG = 40, 1000

Config = dict[str, Any]


def rotated(rope: RopeConfig | None) -> Any:
    """All that a rope says, however it says it."""
    if rope is None:
        return None
    tables = (rope_table(rope, POSITIONS, length).tobytes() for length in (0, LONG))
    return *tables, rope.rotary_dim, rope.interleaved, score_factor(rope)


def meaning(config: Config) -> Config | str:
    """Returns what a config computes, or why it is refused."""
    try:
        model = build_model(RawConfig(copy.deepcopy(config)))
    except UnsupportedError as error:
        return str(error)
    found = {field.name: getattr(model.config, field.name) for field in fields(model.config)}
    for name in ("rope", "local_rope"):
        found[name] = rotated(found[name]) if any(model.config.rope_layers) else None
    if config["model_type"] in MULTIMODAL:
        del found["tie_word_embeddings"]  # their tensors say so
    return found | {"model": type(model)}


def applied(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with values by path; None: without. Objects that lose all they have go too."""
    made = copy.deepcopy(config)
    for path, value in changes.items():
        *outer, last = path.split(".")
        parts = [made]
        for key in outer:
            parts.append(parts[-1].setdefault(key, {}))
        parts[-1][last] = value
        if value is None:
            del parts[-1][last]
            for part, key in zip(parts[-2::-1], outer[::-1], strict=True):
                if not part[key]:
                    del part[key]
    return made


def spelled(case: str, spelling: str) -> Config:
    file = {"wide": "config.json", "transformers5": "config.json"}.get(spelling)
    config: Config = json.loads((DATA / case / (file or CONFIG_FILES["published"])).read_text())
    if spelling == "wide":
        for part in (config, config.get("text_config", {})):
            for key in ("hidden_size", "n_embd", "n_head", "num_attention_heads", "num_heads"):
                if isinstance(part.get(key), int):
                    part[key] *= 8
    return config


def test_the_table_has_every_model_type() -> None:
    """Or a model that also sees, of which it is the text model."""
    raws = [RawConfig.open(DATA / case) for case in TABLE if case in MULTIMODAL]
    texts = {text_config(raw).values["model_type"] for raw in raws}
    assert set(TABLE) | texts == {*ARCHITECTURES, *MULTIMODAL}


@pytest.mark.parametrize("case", TABLE)
def test_keys_that_are_left_out(case: str) -> None:
    """A config with keys left out means what transformers' whole config does, or is refused."""
    for spelling in TABLE[case]:
        whole = spelled(case, "transformers5" if spelling == "published" else spelling)
        own, compared = spelled(case, spelling), 0
        base = meaning(own)
        rows = TABLE[case]["transformers5" if spelling == "wide" else spelling]
        for key, changes in (rows | TABLE[case][spelling]).items():
            found = meaning(applied(own, {key: None}))
            expected = meaning(applied(whole, changes))
            if isinstance(found, str):
                continue
            assert found == expected, (spelling, key, changes)
            compared += 1
        assert compared > 5 or isinstance(base, str)


# Live: transformers itself, and its logits


@pytest.fixture(scope="module")
def scripts() -> tuple[ModuleType, ModuleType]:
    """make_references.py and make_config_references.py as modules."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        names = ("make_references", "make_config_references")
        references, table = (importlib.import_module(name) for name in names)
    finally:
        sys.path.pop(0)
    return references, table


@pytest.mark.live
@pytest.mark.parametrize("case", TABLE)
def test_the_table_is_what_transformers_takes(
    scripts: tuple[ModuleType, ModuleType], case: str
) -> None:
    assert json.loads(json.dumps(scripts[1].defaults(case))) == TABLE[case]


# Values for keys that have none of their own, for every architecture.
UNSET: Config = {
    "attention_bias": True,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 2.0,
    "bias": True,
    "clip_qkv": 0.5,
    "decoder_sparse_step": 2,
    "final_logit_softcapping": 2.0,
    "first_k_dense_replace": 1,
    "full_attention_interval": 2,
    "head_dim": 32,
    "hidden_act": "relu",
    "intermediate_size": 48,
    "layer_types": ["full_attention", "sliding_attention"],
    "lm_head_bias": True,
    "logit_scale": 0.5,
    "mlp_bias": True,
    "mlp_layer_types": ["sparse", "dense"],
    "moe_layer_freq": 2,
    "n_group": 2,
    "no_rope_layers": [1, 0],
    "norm_topk_prob": False,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "qkv_bias": True,
    "rms_norm_eps": 0.03,
    "rope_local_base_freq": 300.0,
    "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    "rope_theta": 300.0,
    "rotary_emb_base": 300,
    "rotary_pct": 0.5,
    "routed_scaling_factor": 0.5,
    "scale_attn_weights": False,
    "scoring_func": "sigmoid",
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 0.1],
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_bias": True,
    "use_qk_norm": True,
    "use_sliding_window": True,
}
ACTIVATIONS = {"silu": "gelu", "gelu": "relu", "relu": "silu"}


def other(key: str, value: Any) -> Any:
    """Another value of a key, None for one that has none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return ACTIVATIONS.get(value.removesuffix("_new").removesuffix("_pytorch_tanh"))
    if isinstance(value, int):
        return {"num_hidden_layers": value}.get(key, 2 * value or 1)
    if isinstance(value, float):
        return 0.03 if value < 1e-3 else value / 2
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else None
    return UNSET.get(key) if value is None else None


def changed(config: Config, read: set[str]) -> Iterator[tuple[str, Any]]:
    """Keys by path, and other values for them: of the config, and of what we read."""
    inner = {
        f"{outer}.{key}": value
        for outer, of in config.items()
        if isinstance(of, dict)
        for key, value in of.items()
    }
    unset = dict.fromkeys((UNSET.keys() | read) - config.keys())
    for path, value in (config | inner | unset).items():
        if (new := other(path.split(".")[-1], value)) is not None:
            yield path, new


YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, Config] = {
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one mscale": YARN | {"mscale": 0.7},
    "yarn, attention_factor": YARN
    | {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 2.0},
    "yarn, beta": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, of a part": YARN | {"partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    "default": {"rope_type": "default", "rope_theta": 777.0},
    "default, of a part": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def with_rope(config: Config, layer_type: str, rope: Config) -> Config:
    """That of a layer type, or where it is "" of all layers, in transformers 5's spelling."""
    made = copy.deepcopy(config)
    text = made.get("text_config", made)
    own = text["rope_parameters"][layer_type] if layer_type else text["rope_parameters"]
    kept = {key: own[key] for key in ("rope_theta", "mrope_section") if key in own}
    new = kept | copy.deepcopy(rope)
    if layer_type:
        text["rope_parameters"][layer_type] = new
    else:
        text["rope_parameters"] = new
    return made


@pytest.mark.live
@pytest.mark.parametrize("case", TABLE)
def test_ropes_are_those_of_transformers(scripts: tuple[ModuleType, ModuleType], case: str) -> None:
    """The frequencies and the factor on cos and sin, of each layer type that has its own."""
    base = spelled(case, "transformers5")
    parameters = base.get("text_config", base).get("rope_parameters")
    if parameters is None or case == "granite_swa":  # whose layers have thetas of their own
        return
    types = [name for name in LAYER_TYPES if name in parameters]
    for layer_type, (name, rope) in itertools.product(types or [""], ROPES.items()):
        config = with_rope(base, layer_type, rope)
        try:
            ours = build_model(RawConfig(copy.deepcopy(config))).config
            made = scripts[0].transformers_config(config)
            model = scripts[0].auto_class(made).from_config(made)
        except Exception:
            continue  # refused by one of both
        modules = [of for of in model.modules() if hasattr(of, "rope_type")]
        (module, *_) = [of for of in modules if "Vision" not in type(of).__name__]
        for own, prefix in ((ours.rope, LAYER_TYPES[0]), (ours.local_rope, LAYER_TYPES[1])):
            start = f"{prefix}_" if types else ""
            if own is None or not hasattr(module, f"{start}inv_freq"):
                continue
            factor = getattr(module, f"{start}attention_scaling")
            angles = np.arange(POSITIONS)[:, None] * getattr(module, f"{start}inv_freq").numpy()
            wanted = factor * np.stack([np.cos(angles), np.sin(angles)], -1)
            found = rope_table(own, POSITIONS) * ([1, -1] if own.backwards else 1)
            np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=f"{layer_type} {name}")


class Judge:
    """transformers, of the weights of a case or of new ones."""

    def __init__(self, script: ModuleType, case: str) -> None:
        self.script, self.case = script, script.CASES[case]
        self.ids = np.random.default_rng(0).integers(3, self.case.vocab_size, POSITIONS)
        # transformers does not read all that it writes for some models.
        self.config = spelled(case, "transformers5" if "wide" in TABLE[case] else "published")
        self.model = self.built(self.config)
        self.logits = self.answer(self.model)

    def built(self, config: Config, seed: int = 0) -> Any:
        made = self.script.Case(config | {"torch_dtype": "float32"}, embedding=self.case.embedding)
        return self.script.random_model(made, np.random.default_rng(seed))

    def answer(self, model: Any) -> Any:
        import torch

        with torch.no_grad():
            return model(torch.from_numpy(self.ids)[None]).logits[0].numpy()

    def takes(self, config: Config) -> str | None:
        """Whether a config is the "same" model as the case's, or "other", or one that has "more"
        tensors; None where it is refused."""
        import torch

        try:
            made = self.script.transformers_config(config)
            model = self.script.auto_class(made).from_config(
                made, dtype=torch.float32, attn_implementation="eager"
            )
            self.answer(model.eval())
        except Exception:
            return None
        own, new = self.model.state_dict(), model.state_dict()
        shapes = [{name: of.shape for name, of in state.items()} for state in (own, new)]
        if shapes[1].keys() > shapes[0].keys():
            return "more"
        if shapes[0] != shapes[1]:
            return "other"
        model.load_state_dict(own)
        return "other" if relative_error(self.answer(model), self.logits) > 1e-5 else "same"

    def checkpoint(self, config: Config, folder: Path) -> Any:
        """Write a new model, whose experts are chosen clearly; returns its logits."""
        for seed in itertools.count():
            model = self.built(config, seed)
            with self.script.RoutingMargins(model) as routing:
                logits = self.answer(model)
            if not routing.margins or min(routing.margins) >= self.script.MIN_ROUTING_MARGIN:
                break
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return logits


@pytest.mark.live
@pytest.mark.parametrize("case", [case for case in TABLE if case in ARCHITECTURES])
def test_keys_that_are_changed(
    device: Device, scripts: tuple[ModuleType, ModuleType], case: str, tmp_path: Path
) -> None:
    """A change that changes transformers' logits changes ours to the same, or is refused. Changes
    that go together are made together, and apart if they are wrong."""
    judge = Judge(scripts[0], case)
    raw = RawConfig(copy.deepcopy(judge.config))
    base, _ = meaning(judge.config), build_model(raw)
    folders = (tmp_path / str(i) for i in itertools.count())

    def error(changes: Config) -> float:
        config, folder = applied(judge.config, changes), next(folders)
        expected = judge.checkpoint(config, folder)
        with device.scope():
            return relative_error(
                scores(build_engine(device, folder), judge.ids.tolist()), expected
            )

    groups: list[Config] = []
    for path, value in changed(judge.config, raw.read):
        if scripts[1].is_silent(path) or path == "max_position_embeddings":
            continue
        config = applied(judge.config, {path: value})
        found = meaning(config)
        differs = None if isinstance(found, str) else judge.takes(config)
        if differs is None or (differs != "other" and found == base):
            continue  # surplus tensors are refused
        assert found != base, f"{path} = {value} is not read"
        for group in groups:
            both = applied(judge.config, group | {path: value})
            if not isinstance(meaning(both), str) and judge.takes(both):
                group[path] = value
                break
        else:
            groups.append({path: value})
    print(case, groups)
    assert sum(map(len, groups)) > 2
    wrong = []
    for group in groups:
        if error(group) > TOLERANCE:
            wrong += [path for path in group if error({path: group[path]}) > TOLERANCE] or [group]
    assert not wrong
