"""config.json: what is not implemented, or says nothing sensible, is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reference_models import CONFIG_FILES, DATA

from infer.kernels.errors import UnsupportedError
from infer.models import build_model
from infer.models.config import RawConfig


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("granite", {"logits_scaling": 0.0}, "'logits_scaling' must be positive"),
        ("granite", {"residual_multiplier": "1"}, "'residual_multiplier' must be of type float"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        ("llama", {"no_rope_layer_interval": 4}, "no_rope_layer_interval = 4"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be .* 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must be"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_is_refused(case: str, change: dict[str, Any], message: str) -> None:
    values = json.loads((DATA / case / CONFIG_FILES["published"]).read_text())
    build_model(RawConfig(values))
    with pytest.raises(UnsupportedError, match=message):
        build_model(RawConfig(values | change))
