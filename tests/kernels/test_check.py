"""The check of a user's device: `infer devices --check`."""

from __future__ import annotations

import pytest

from infer.kernels.checks import check, functions
from infer.kernels.checks.check import check_device
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.shader import KernelSpec, Shader, render, render_text

CHECKED = {f"{case.kernel}, {case.name}": case for case in check.cases()}
FIRST = {case.kernel: name for name, case in reversed(CHECKED.items())}  # of each kernel


def test_check_is_of_every_kernel() -> None:
    assert len(CHECKED) == len([*check.cases()])
    kernels = {"attention_softmax": "softmax", "matmul_tiled": "matmul", "silu": "activation"}
    named = {*functions.__all__} - {"profile", "rope_table", "validate"}
    assert FIRST.keys() >= {kernels.get(name, name) for name in named}


@pytest.mark.dawn
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.full)
        for name in CHECKED
    ],
)
def test_check_passes_here(least_device: Device, name: str) -> None:
    result = CHECKED[name].check(least_device)
    assert result.ok, result


WRONG_ACTIVATION = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(1)
fn main() {
  y[0] = x[0]"""


@pytest.mark.parametrize(
    ("ending", "message"),
    [(";\n}", ""), (" + 1u;\n}", "activation.wgsl:6:10: "), ("\n}", "activation.wgsl:7:1: ")],
)
def test_check_finds_a_broken_kernel(
    monkeypatch: pytest.MonkeyPatch, ending: str, message: str
) -> None:
    """One that computes something else, and two that do not compile."""

    def broken(spec: KernelSpec) -> Shader:
        if spec.name != "activation":
            return render(spec)
        return render_text(WRONG_ACTIVATION + ending, "activation.wgsl")

    wanted = [case for case in check.cases() if case.kernel in ("activation", "elementwise_add")]
    monkeypatch.setattr(check, "cases", lambda: iter(wanted))
    monkeypatch.setattr("infer.kernels.gpu.device.render", broken)
    with Device.open() as device:  # of its own: the others have compiled the kernel
        seen: list[check.CheckResult] = []
        results = check_device(device, seen.append)
    assert seen == results
    assert {result.kernel for result in results if not result.ok} == {"activation"}
    assert [result.kernel for result in results if result.ok] == ["elementwise_add"]
    assert all(message in result.message for result in results if not result.ok)
