"""What a key of config.json means is what transformers takes it for: those left out, and others.

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
import pytest
from engines import build_engine, scores
from reference_models import CONFIG_FILES, DATA, relative_error

from infer.kernels.device import Device
from infer.kernels.errors import InferError, UnsupportedError
from infer.models import ARCHITECTURES, MULTIMODAL, build_model
from infer.models.config import RawConfig, RopeConfig
from infer.models.multimodal import text_config
from infer.models.rope import rope_table, score_factor

ROOT = Path(__file__).resolve().parent.parent
TABLE = json.loads((DATA.parent / "config_defaults.json").read_text())
TOLERANCE = 1e-4
POSITIONS, LONG = 40, 1000

Config = dict[str, Any]


def turned(rope: RopeConfig | None) -> Any:
    """All that a rope says, however it says it."""
    if rope is None:
        return None
    tables = (rope_table(rope, POSITIONS, length).tobytes() for length in (0, LONG))
    return *tables, rope.rotary_dim, rope.interleaved, score_factor(rope)


def meaning(config: Config) -> Config | str:
    """What is computed by a config, or why it is refused."""
    try:
        model = build_model(RawConfig(copy.deepcopy(config)))
    except InferError as error:
        assert isinstance(error, UnsupportedError)
        return str(error)
    found = {field.name: getattr(model.config, field.name) for field in fields(model.config)}
    for name in ("rope", "local_rope"):
        found[name] = turned(found[name]) if any(model.config.rope_layers) else None
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
    """What is computed is that of the whole config as transformers takes it, or it is refused."""
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

