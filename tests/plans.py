"""Weights of a few specs, planned and loaded at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import GpuTensor
from infer.models.loading import load
from infer.models.loading import random_weights as at_random
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.packing import Stored
from infer.models.loading.plan import plan_random, plan_weights
from infer.models.loading.shapes import Published
from infer.models.loading.weights import WeightSpec


def load_weights(
    device: Device,
    specs: Iterable[WeightSpec],
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    ignorable: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> dict[str, GpuTensor]:
    """options: of load_weights."""
    plan = plan_weights(specs, checkpoint, dtype, ignorable)
    return load.load_weights(device, plan, **options)


def random_weights(
    device: Device,
    specs: Iterable[WeightSpec],
    dtype: str,
    seed: int = 0,
    published: Published | None = None,
) -> dict[str, GpuTensor]:
    return at_random.random_weights(device, plan_random(specs, dtype, published), seed)


def stored(spec: WeightSpec, checkpoint: Checkpoint, dtype: str | None = None) -> Stored:
    """How a weight lies on the GPU, whatever else the checkpoint has."""
    return plan_weights([spec], checkpoint, dtype, lambda name: True).weights[0].stored
