"""A dispatch plan: the kernels of one step, as data, recorded anew for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.kernels.gpu.device import Buffer, Device, Pipeline
from infer.kernels.gpu.native.library import NOTHING, Size
from infer.kernels.gpu.shader import KernelSpec

# Workgroups as a function of (rows, kv_len): attention costs what is in the cache, no more.
Grid = Size | Callable[[int, int], Size]
Count = Callable[[int, int], int]  # the same of bytes or operations


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One kernel on its buffers. moved and flops count bytes of memory and operations, given
    (rows, kv_len), for the profile."""

    pipeline: Pipeline
    bind_group: Any
    grid: Grid
    moved: Callable[[int, int], int] = lambda rows, kv_len: 0
    flops: Callable[[int, int], int] = lambda rows, kv_len: 0

    def size(self, rows: int, kv_len: int) -> Size:
        return self.grid(rows, kv_len) if callable(self.grid) else self.grid


def needed(dispatches: Sequence[Dispatch], rows: int, kv_len: int) -> list[Dispatch]:
    """Returns the dispatches that a step of so many rows and positions needs."""
    return [item for item in dispatches if item.size(rows, kv_len) is not NOTHING]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """The dispatches of a step: body up to the last layer, head from the final norm to logits."""

    body: tuple[Dispatch, ...]
    head: tuple[Dispatch, ...] = field(default=())


def linear_grid(count: int, limit: int) -> Size:
    """`count` workgroups as a grid whose sides keep the limit; kernels find their index with
    `workgroup_index` of grid.wgsl and skip what is beyond their own count."""
    rows = max(1, -(-count // limit))
    return (max(1, -(-count // rows)), rows, 1)  # even rows: few surplus workgroups


def dispatch(
    device: Device, spec: KernelSpec, buffers: Sequence[Buffer], grid: Grid, **counts: Any
) -> Dispatch:
    """Compile (or find) a kernel and bind its buffers."""
    pipeline = device.pipeline(spec)
    return Dispatch(pipeline, device.bind(pipeline, buffers), grid, **counts)
