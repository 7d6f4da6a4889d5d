"""From the output of a forward pass to the kernels of a kind of step."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from infer.kernels.compiler.fusion import rewrite
from infer.kernels.compiler.invariant import InvariantTuning
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.graph import Graph, Value
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import StepKind, Target
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.linear import Changes

NO_CHANGES: Changes = MappingProxyType({})


def lower(
    device: Device,
    output: Value,
    kind: StepKind,
    step: Buffer,
    output_buffer: Buffer,
    *,
    fuse: bool = True,
    tuning: Tuning | None = None,
    changes: Changes = NO_CHANGES,
    also: Iterable[Value] = (),
    given: GpuTensor | None = None,
) -> Lowering:
    """The kernels that compute `output` into `output_buffer`, for a kind of step on the device.
    step: the buffer of its rows. changes: low-rank changes beside weights. also: as of Graph.
    given: as of Target. fuse=False gives each operation kernels of its own."""
    graph = Graph(output, also)
    rules = InvariantTuning if kind.invariant else Tuning
    target = Target(device, kind, tuning or rules(device), fuse, given)
    rewrite(graph, target, changes)
    lowering = Lowering(target, graph.output, step, output_buffer)
    for value in graph.values:
        value.lower(lowering)
    lowering.kernels.sort(key=lambda kernel: kernel.head)  # in the order in which they run
    return lowering
