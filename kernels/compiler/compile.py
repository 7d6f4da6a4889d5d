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


def target_of(
    device: Device,
    kind: StepKind,
    *,
    fuse: bool = True,
    tuning: Tuning | None = None,
    given: GpuTensor | None = None,
) -> Target:
    """A kind of step on a device, by the rules that belong to it unless others are given. given: as
    of Target. fuse=False gives each operation kernels of its own."""
    rules = InvariantTuning if kind.invariant else Tuning
    return Target(device, kind, tuning or rules(device), fuse, given)


def lower(
    target: Target,
    output: Value,
    step: Buffer,
    output_buffer: Buffer,
    *,
    changes: Changes = NO_CHANGES,
    also: Iterable[Value] = (),
) -> Lowering:
    """The kernels that compute `output` into `output_buffer` in a step of the target's kind. step:
    the buffer of its rows. changes: low-rank changes beside weights. also: as of Graph."""
    graph = Graph(output, also)
    rewrite(graph, target, changes)
    lowering = Lowering(target, graph.output, step, output_buffer)
    for value in graph.values:
        value.lower(lowering)
    lowering.kernels.sort(key=lambda kernel: kernel.head)  # in the order in which they run
    return lowering
