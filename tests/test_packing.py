"""Quantised checkpoints on the GPU: what a format's own library makes of each matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from numpy.typing import NDArray
from test_formats import CASES, DATA, KEY, copy_of, edit, opened, values_of  # noqa: F401

from infer.kernels import reference
from infer.kernels.check import int8_rows
from infer.kernels.device import Device, Settings
from infer.kernels.forward import Forward
from infer.kernels.reference import nmse
from infer.kernels.tensor import QUANTIZED, GpuTensor
from infer.models.formats import find_packed
from infer.models.weights import Source, WeightSpec, load_weights

Array = NDArray[Any]
LIMIT = 1e-10  # of f32 arithmetic


def loaded(device: Device, folder: Path, shape: tuple[int, ...], name: str = "w") -> GpuTensor:
    found, checkpoint = opened(folder)
    spec = WeightSpec(name, (Source(KEY, shape),))
    packed = find_packed(checkpoint, found, [spec])
    return load_weights(device, [spec], packed)[name]


def shape_of(case: str) -> tuple[int, int]:
    rows, columns = values_of(case).shape
    return rows, columns


CASES_2D = [case for case in CASES if case != "mxfp4"]  # that one has three dimensions


@pytest.mark.parametrize("settings", [Settings(), Settings(subgroups=False, f16=False)])
@pytest.mark.parametrize("case", CASES_2D)
def test_every_format_on_the_gpu(open_device: OpenDevice, case: str, settings: Settings) -> None:
    """Its values, row by row, and products with them."""
    device, expected = open_device(settings), values_of(case)
    with device.scope():
        weight = loaded(device, DATA / case, shape_of(case))
        rows, columns = weight.shape
        order = np.arange(columns)
        if weight.order is not None:
            order = device.read(weight.order, np.uint32)
        forward = Forward(device, rows)
        y = forward.run(forward.ops.embedding(weight), tokens=list(range(rows)))
        assert nmse(y, expected[:, order]) <= 1e-14
    for n in (1, 3, 40):
        rng = np.random.default_rng(n)
        x = exact = rng.standard_normal((n, columns), np.float32)
        if weight.dtype in QUANTIZED:  # activations that are known as int8, in the weight's order
            quantized = int8_rows(rng, n, columns)
            x, exact = (np.empty_like(part) for part in quantized)
            x[:, order], exact[:, order] = quantized
        with device.scope():
            weight = loaded(device, DATA / case, shape_of(case))
            forward = Forward(device, n)
            y = forward.run(forward.ops.linear(forward.input(x), weight))
        assert nmse(y, reference.matmul(exact, expected)) <= LIMIT
