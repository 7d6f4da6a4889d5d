"""MLX's quantised matrices (https://ml-explore.github.io/mlx: quantize), as mlx-lm publishes them.

For a module of `columns` inputs and `rows` outputs, embeddings among them:

    weight  uint32 [rows, columns * b / 32]   codes of b bits, one stream for each row
    scales  [rows, groups]
    biases  float [rows, groups]              of the mode "affine" alone

| mode   | b             | group       | scales      | value               |
| ------ | ------------- | ----------- | ----------- | ------------------- |
| affine | 2 to 6, 8     | 32, 64, 128 | float       | scale * code + bias |
| mxfp4  | 4             | 32          | E8M0, uint8 | scale * E2M1        |
| nvfp4  | 4             | 16          | E4M3, uint8 | scale * E2M1        |
| mxfp8  | 8             | 32          | E8M0, uint8 | scale * E4M3        |

The key `quantization` of the config has one size and mode for all modules, and by their names those
of others.

Experts of a layer are stacked, quantised or not: each of these tensors of `switch_mlp.gate_proj`,
`up_proj` and `down_proj`, in gpt-oss of `experts.gate_proj` and so on, in Nemotron of
`switch_mlp.fc1` and `fc2`, has one dimension more, the experts. So have the two halves of
DeepSeek's kv_b_proj, `embed_q` (W_UK, as queries are multiplied by it) and `unembed_out` (W_UV):
the heads. See `unstacked`. The taps of short convolutions are [channels, taps, 1], and the weights
of norms that the hub has less one are whole. See `untransposed`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.codes import TABLES
from infer.models.loading.checkpoint import Checkpoint, listed
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import FLOATS, Format, matrix_shape, part
from infer.models.loading.formats.grouped import Grouped, Scheme, from_e8m0, unpack
from infer.models.loading.formats.packed import Packed, read_rows

_STACKED = re.compile(
    r"(.*)\.(?:switch_mlp|experts)\.((?:gate|up|down)_proj|fc[12])\.(weight|scales|biases|bias)"
)
_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)")
_HEADS = re.compile(r".*\.self_attn\.(?:embed_q|unembed_out)\.(?:weight|scales|biases)")
_CONV = re.compile(r".*\.conv(?:1d)?\.weight")
# The hub's names of an expert's projections in Mixtral, and the blocks that have these names.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LIKE_MIXTRAL = (".block_sparse_moe", ".feed_forward")
_UNGATED = {"fc1": "up_proj", "fc2": "down_proj"}
_MOST_EXPERTS = 10_000  # more would be damage

# mode -> bits, group, kind
_MICROSCALING = {"mxfp4": (4, 32, "mxfp4"), "nvfp4": (4, 16, "mxfp4"), "mxfp8": (8, 32, "e4m3")}


class Mlx(Format):
    """All modes but "affine" with one bit."""

    method = "mlx"

    def __init__(self, config: RawConfig) -> None:
        self.config = config
        _mode(config)
        for key, value in config.values.items():
            if isinstance(value, dict):
                _mode(config.section(key))

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        module = key.removesuffix(".weight")
        if f"{module}.scales" not in checkpoint.tensors:
            found = checkpoint.tensors.get(key)
            if found is None or found.dtype != "U32":  # codes without scales are damage
                return None
        rows, columns = matrix_shape(checkpoint, key, shape)
        names = [name for name in _names(module) if isinstance(self.config.values.get(name), dict)]
        bits, group, kind = _mode(self.config.section(names[0]) if names else self.config)
        if columns % group or columns * bits % 32:
            raise UnsupportedError(
                f"{checkpoint.folder}: {module} has {columns} columns, no multiple of {group}."
            )
        affine, grouped = kind == "int", [(rows, columns // group)]
        weight = part(checkpoint, key, [(rows, columns * bits // 32)], ["U32"])
        scales = part(checkpoint, f"{module}.scales", grouped, FLOATS if affine else ["U8"])
        if not affine:
            scheme = Scheme(kind, bits, group, "f16" if group == 16 else "e8m0")
            return _Matrix(key, (rows, columns), scheme, (weight, scales))
        biases = part(checkpoint, f"{module}.biases", grouped, [scales.dtype])
        scheme = Scheme(kind, bits, group, scales.dtype, biases=True)
        return _Matrix(key, (rows, columns), scheme, (weight, scales, biases))


def _mode(config: RawConfig) -> tuple[int, int, str]:
    """Bits, group and kind. Raises UnsupportedError."""
    mode = config.get("mode", "affine", str)
    if mode in _MICROSCALING:
        bits, group, kind = _MICROSCALING[mode]
        config.expect("bits", bits)
        config.expect("group_size", group)
        return bits, group, kind
    config.expect("mode", "affine", *_MICROSCALING)
    config.expect("bits", 4, 2, 3, 5, 6, 8)
    config.expect("group_size", 64, 32, 128)
    return config.get("bits", 4, int), config.get("group_size", 64, int), "int"


def untransposed(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with the taps of convolutions as the hub has them, [channels, 1,
    taps], where they are transposed. mlx-lm completes norms as it transposes, and tells by the taps
    whether that was done. Raises CheckpointError for files that were converted in part."""
    tensors = checkpoint.tensors
    taps = {n: t for n, t in tensors.items() if _CONV.fullmatch(n) and len(t.shape) == 3}
    theirs = {n: t for n, t in taps.items() if t.shape[1] > t.shape[2] == 1}
    stacks = [n for n in tensors if ".switch_mlp." in n] if taps else []
    if not theirs and not stacks:
        return checkpoint
    if others := taps.keys() - theirs:
        raise CheckpointError(
            f"{checkpoint.folder} has {listed([*theirs, *stacks], 1)} as MLX has them and "
            f"{listed(sorted(others), 1)} as the hub does, so that nobody can tell which of them "
            "the weights of norms follow. Convert the model again."
        )
    own = {n: replace(t, shape=(t.shape[0], 1, t.shape[1])) for n, t in theirs.items()}
    return replace(checkpoint, tensors=tensors | own, whole_norms=True)


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with a tensor for each expert, by its name on the hub, where MLX
    stacks them, and with one matrix for all heads."""
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if _HEADS.fullmatch(name) and len(info.shape) == 3:
            heads, rows, columns = info.shape
            tensors[name] = replace(info, shape=(heads * rows, columns))
            continue
        match = _STACKED.fullmatch(name)
        stack = match is not None and len(info.shape) == (2 if match[3] == "bias" else 3)
        if match is None or not stack or 0 in info.shape or info.shape[0] > _MOST_EXPERTS:
            tensors[name] = info
            continue
        block, part, kind = match.groups()
        part = _MIXTRAL[part] if block.endswith(_LIKE_MIXTRAL) else _UNGATED.get(part, part)
        count, *shape = info.shape
        for expert in range(count):
            own = f"{block}.experts.{expert}.{part}.{kind}"
            tensors[own] = info.part(own, expert * prod(shape[:-1]), tuple(shape))
    return replace(checkpoint, tensors=tensors)


def _names(module: str) -> list[str]:
    """Returns the names that the config may have for an expert's module; for another, its own."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return [module]
    part = {theirs: own for own, theirs in _MIXTRAL.items()}.get(match[2], match[2])
    names = [f"{match[1]}.{stack}.{part}" for stack in ("switch_mlp", "experts")]
    return names + [f"{match[1]}.switch_mlp.{fc}" for fc, own in _UNGATED.items() if own == part]


class _Matrix(Packed):
    def read(self, start: int, stop: int) -> Grouped:
        weight, scales, *biases = self.tensors
        scheme, columns = self.scheme, self.shape[1]
        codes = unpack(read_rows(weight, start, stop).view(np.uint8), scheme.bits, columns)
        scale = read_rows(scales, start, stop)
        if scales.dtype == "U8":
            scale = TABLES["e4m3"][scale] if scheme.group == 16 else from_e8m0(scale)
        bias = read_rows(biases[0], start, stop) if biases else None
        return Grouped(scheme, codes, scale, biases=bias)
