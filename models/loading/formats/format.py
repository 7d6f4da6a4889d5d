"""The base class of formats: which tensors of a checkpoint make a matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.models.loading.checkpoint import Checkpoint, listed
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.packed import Packed
from infer.models.loading.tensors import TensorInfo

FLOATS = ("f32", "f16", "bf16")

# Values that files may quantise besides weights, and the ends of their scales' names.
ACTIVATIONS, CACHE = "activations", "the KV cache"
_LEFT_OUT = {
    CACHE: (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
    ACTIVATIONS: (
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".activation_scale",
        "_proj_activation_scale",
    ),
}


class Format(ABC):
    """A way of publishing quantised matrices, as a config describes it.

    ignored: what the config quantises besides weights, in words for people. How it does that is not
    used: activations are as the kernels of the weights want them, int8 with scales of their own
    where weights are integers, and the cache is as its option says.
    """

    method: ClassVar[str]
    ignored: tuple[str, ...] = ()

    @abstractmethod
    def __init__(self, config: RawConfig) -> None:
        """Raises UnsupportedError for a variant that is not implemented."""

    @abstractmethod
    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        """The matrix that the model asks for as tensor `key`, or None where the checkpoint holds it
        as a tensor of floats, or not at all: what is in the files decides which modules are
        quantised, and lists of exceptions in the config need not be read.

        Raises CheckpointError for parts that are missing or of wrong shape, and UnsupportedError
        for those of a dtype or group size that is not implemented. Reads headers alone, or indices
        of columns.
        """

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether a tensor that belongs to no matrix says nothing that is computed with."""
        return False


def left_out(name: str) -> str | None:
    """Returns the name of the values that a tensor is the scale of, where these scales are not
    used; None for any other tensor."""
    return next((of for of, ends in _LEFT_OUT.items() if name.endswith(ends)), None)


# Parts of a matrix


def part(
    checkpoint: Checkpoint, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> TensorInfo:
    """A tensor of one of these shapes and dtypes. Raises CheckpointError and UnsupportedError."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {name}, a part of a quantised matrix. Download the model "
            "again, or give the folder of a complete one."
        )
    if info.shape not in shapes:
        raise wrong_shape(info, info.shape, " or ".join(map(str, shapes)))
    if info.dtype not in dtypes:
        raise UnsupportedError(
            f"{checkpoint.folder}: {name} is of dtype {info.dtype}, which is not implemented there "
            f"(only {listed(dtypes)})."
        )
    return info


def wrong_shape(info: TensorInfo, found: object, wanted: object) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: {info.name} is {found}, not {wanted}. The files and the config are of "
        "different models: download all of them again."
    )


def matrix_shape(checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> tuple[int, int]:
    """The shape as (rows, columns). Raises UnsupportedError for a tensor that is no matrix."""
    if len(shape) != 2:
        raise UnsupportedError(
            f"{checkpoint.folder}: {key} of shape {tuple(shape)} is quantised, which is only "
            "implemented for matrices."
        )
    return shape[0], shape[1]
