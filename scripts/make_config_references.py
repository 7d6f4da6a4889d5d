"""Make tests/data/config_defaults.json: what transformers takes for keys that a config leaves out.

    python scripts/make_config_references.py

Needs torch and transformers. The configs are those of the tiny models in tests/data/models that
are named after their model_type, in both spellings, and "wide", with more heads, so that a default
is not by chance what the config says. Each loses one key at a time; the file has

{case: {spelling: {key: {name: value}}}}

what transformers' whole config has then that it has not otherwise; keys of objects in objects are
joined by a dot, and null also stands for what is gone. "wide" has the rows that are not those of
the spelling of transformers 5.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from make_references import CASES, DATA, transformers_config
from transformers.utils import logging

TABLE = DATA.parent / "config_defaults.json"
FILES = {"published": "config.published.json", "transformers5": "config.json"}

# Keys that say nothing about logits.
SILENT = {
    "_attn_implementation_autoset",
    "architectures",
    "attention_probs_dropout_prob",
    "auto_map",
    "classifier_dropout",
    "dtype",
    "id2label",
    "image_token_index",
    "initializer_range",
    "label2id",
    "model_type",
    "output_router_logits",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vision_config",
}
_SILENT_ENDS = ("_dropout", "_pdrop", "_token_id", "_jitter_noise", "_loss_coef", "_loss_alpha")
# Without these nothing is built.
SIZES = {"hidden_size", "n_layer", "num_hidden_layers", "num_layers", "text_config"}
_WIDER = 8
_WIDTHS = ("hidden_size", "n_embd", "n_head", "num_attention_heads", "num_heads")


def is_silent(key: str) -> bool:
    return key in SILENT or key.endswith(_SILENT_ENDS)


def wide(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with more heads, each as wide as before."""
    made = copy.deepcopy(dict(config))
    for part in (made, made.get("text_config", {})):
        part |= {key: _WIDER * part[key] for key in _WIDTHS if isinstance(part.get(key), int)}
    return made


def configs(case: str) -> dict[str, dict[str, Any]]:
    """Returns the configs of a case by their names in the table."""
    found = {name: json.loads((DATA / case / file).read_text()) for name, file in FILES.items()}
    return found | {"wide": wide(found["transformers5"])}


def without(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields, for each key of a config and of the objects in it, the key and the config without
    it."""
    for key, value in config.items():
        if is_silent(key):
            continue
        yield path + key, {other: own for other, own in config.items() if other != key}
        if isinstance(value, dict):
            for inner, rest in without(value, f"{path}{key}."):
                yield inner, {**config, key: rest}


def whole(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """All keys as transformers takes them, or None where it refuses the config."""
    try:
        made = transformers_config(config)
    except Exception:
        return None
    keys: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return keys


def flat(keys: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns all keys by their paths, those within objects too."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


def defaults(case: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of a case, by spelling."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for spelling, config in configs(case).items():
        own = whole(config)
        if own is None:  # transformers cannot read every config that it writes
            continue
        base, rows = flat(own), table.setdefault(spelling, {})
        for key, rest in without(config):
            made = whole(rest)
            if key in SIZES or made is None:
                continue
            other = flat(made)
            names = sorted(name for name in {*base, *other} if base.get(name) != other.get(name))
            row = {name: other.get(name) for name in names if not is_silent(name.split(".")[-1])}
            if spelling != "wide" or row != table["transformers5"].get(key):
                rows[key] = row
    return table


def named_after_types() -> list[str]:
    return [name for name, case in CASES.items() if case.config["model_type"] == name]


def main() -> None:
    logging.set_verbosity_error()
    table = {case: defaults(case) for case in sorted(named_after_types())}
    lines = (f'"{case}": {json.dumps(rows, sort_keys=True)}' for case, rows in table.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
