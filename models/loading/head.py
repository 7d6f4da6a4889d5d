"""Decides whether the head, which makes the logits, is the embedding matrix.

config.json says so, and the checkpoint may say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from infer.models.blocks.decoder import Decoder
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.tensors import TensorInfo, same_bytes

_HEADS = ("lm_head", "embed_out")  # what checkpoints call it


def with_head(raw: RawConfig, checkpoint: Checkpoint) -> tuple[RawConfig, Checkpoint]:
    """A model that was saved without its head, as those for embeddings are, by the names that its
    tensors have beside one. The embeddings take the place of a head that is not there: nobody
    reads logits of such a model, whatever its config says of the head."""
    if "embed_tokens.weight" not in checkpoint.tensors:
        return raw, checkpoint
    named = {_beside_head(name): info for name, info in checkpoint.tensors.items()}
    tensors = {name: replace(info, name=name) for name, info in named.items()}
    if not any(name.startswith("lm_head.") for name in tensors):
        raw = raw.with_values(tie_word_embeddings=True)
    return raw, replace(checkpoint, tensors=tensors)


def _beside_head(name: str) -> str:
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


def settle_head(model: Decoder, checkpoint: Checkpoint) -> tuple[Decoder, Checkpoint]:
    """The model and its checkpoint where config.json ties the head to the embeddings and the
    checkpoint has a head all the same, as transformers 5 takes that: a head of other values counts,
    one of equal values is left out, and without embeddings it stands for them too. Raises
    CheckpointError."""
    tensors = checkpoint.tensors
    module, head = _first(tensors, _HEADS)
    if not model.config.tie_word_embeddings or not head:
        return model, checkpoint
    spec = next(iter(model.weights()))  # of the embeddings
    keys = [source.key for source in (*spec.sources, *spec.others)]
    own, embeddings = _first(tensors, [key.removesuffix(".weight") for key in keys])
    if embeddings and not _equal(head, embeddings):
        note = (
            f"config.json ties {module} to {own} (tie_word_embeddings), but the files "
            "have both, with different values: both are used, as in transformers. If that is "
            "right, set tie_word_embeddings to false."
        )
        untied = type(model)(model.config.changed(tie_word_embeddings=False))
        return untied, replace(checkpoint, notes=(*checkpoint.notes, note))
    tensors = {name: info for name, info in tensors.items() if info not in head.values()}
    if not embeddings:
        names = {f"{own}.{part}": info for part, info in head.items()}
        tensors |= {name: replace(info, name=name) for name, info in names.items()}
    return model, replace(checkpoint, tensors=tensors)


def _first(
    tensors: Mapping[str, TensorInfo], modules: Sequence[str]
) -> tuple[str, dict[str, TensorInfo]]:
    """The first of the modules that is there, else the first; and what its matrix is made of, by
    the ends of the names."""
    for module in modules:
        start = f"{module}."
        found = {name: info for name, info in tensors.items() if name.startswith(start)}
        parts = {name.removeprefix(start): info for name, info in found.items()}
        parts.pop("bias", None)
        if parts:
            return module, parts
    return modules[0], {}


def _equal(a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo]) -> bool:
    return a.keys() == b.keys() and all(same_bytes(info, b[part]) for part, info in a.items())
