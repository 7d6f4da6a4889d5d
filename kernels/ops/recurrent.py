"""The kernels of layers that keep a state: a short convolution, the gated delta rule, Mamba 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.kernels.compiler.arena import Operand
from infer.kernels.compiler.graph import Value, stride
from infer.kernels.gpu.tensor import HALF, GpuTensor
from infer.kernels.state.layer_state import LayerState

if TYPE_CHECKING:
    from infer.kernels.compiler.lowering import Lowering

_CONV_ROWS = 16  # of a workgroup
_LARGEST = 3e38  # WGSL has no infinity


def lower_short_conv(low: Lowering, value: Value) -> None:
    """Emit the kernel of the short_conv op `value`."""
    weight: GpuTensor = value.attrs["weight"]
    bias: GpuTensor | None = value.attrs["bias"]
    state: LayerState = value.attrs["state"]
    x, x_stride, offset = low.source(value.inputs[0])
    operands: list[Operand] = [low.step, x, weight.buffer, state.inputs, value]
    workgroups = -(-value.width // 64)
    low.emit(
        "short_conv",
        operands if bias is None else [*operands, bias.buffer],
        lambda rows, kv_len: (workgroups, -(-rows // _CONV_ROWS), 1),
        {
            "CHANNELS": value.width,
            "TAPS": state.shape.taps,
            "ROWS": _CONV_ROWS,
            "GATED": value.attrs["gated"],
            "BIAS": bias is not None,
            "ACTIVATION": value.attrs["activation"],
            "X_STRIDE": x_stride,
            "X_OFFSET": offset,
            "Y_STRIDE": stride(value.width),
        },
        moved=lambda rows, kv_len: 4 * rows * (value.inputs[0].width + value.width),
    )


def lower_delta_rule(low: Lowering, value: Value) -> None:
    """Emit the kernel of the delta_rule op `value`."""
    state: LayerState = value.attrs["state"]
    shape = state.shape
    variant = low.tuning.delta_rule(low.kind.rows, shape.key_dim)
    (x, x_stride, _), (gates, gates_stride, _) = map(low.source, value.inputs)
    low.emit(
        "delta_rule",
        (
            low.step,
            x,
            gates,
            value.attrs["a_log"].buffer,
            value.attrs["dt_bias"].buffer,
            state.matrices,
            value,
        ),
        (-(-shape.value_dim // variant.columns), shape.heads, 1),
        variant.params
        | {
            "KEY_HEADS": shape.key_heads,
            "HEADS": shape.heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "X_STRIDE": x_stride,
            "GATES_STRIDE": gates_stride,
            "Y_STRIDE": stride(value.width),
        },
        moved=lambda rows, kv_len: 2 * state.matrices.nbytes + 4 * rows * (x_stride + value.width),
        flops=lambda rows, kv_len: 6 * rows * shape.key_dim * value.width,
    )


def lower_ssm_scan(low: Lowering, value: Value) -> None:
    """Emit the kernel of the ssm_scan op `value`."""
    state: LayerState = value.attrs["state"]
    shape, (dt_min, dt_max) = state.shape, value.attrs["dt_limit"]
    variant = low.tuning.ssm_scan(low.kind.rows, shape.key_dim)
    (x, x_stride, _), (z, z_stride, z_offset), (dt, dt_stride, dt_offset) = map(
        low.source, value.inputs
    )
    operands: list[Operand] = [low.step, x, z, dt, value.attrs["heads"].buffer, state.matrices]
    form = low.next_form(value, low.device.limits.storage_buffers - len(operands))
    if form and form.int8 and (variant.columns % HALF or shape.value_dim % HALF):
        form = None
    keep = form is None or form.keep
    if keep:
        operands.append(value)
    if form is not None:
        operands += low.prepare(value, form, low.kind.rows)
        if form.norm is not None:
            operands.append(form.norm.attrs["weight"].buffer)
    low.emit(
        "ssm_scan",
        operands,
        (-(-shape.value_dim // variant.columns), shape.heads, 1),
        variant.params
        | {
            "GROUPS": shape.key_heads,
            "HEADS": shape.heads,
            "STATE_DIM": shape.key_dim,
            "HEAD_DIM": shape.value_dim,
            "DT_MIN": float(dt_min),
            "DT_MAX": min(float(dt_max), _LARGEST),
            "X_STRIDE": x_stride,
            "Z_STRIDE": z_stride,
            "Z_OFFSET": z_offset,
            "DT_STRIDE": dt_stride,
            "DT_OFFSET": dt_offset,
            "Y_STRIDE": stride(value.width),
            "KEEP": keep,
            "QUANTIZE": form is not None and form.int8,
            "NEXT_NORM": form is not None and form.norm is not None,
        },
        moved=lambda rows, kv_len: 2 * state.matrices.nbytes + 4 * rows * (x_stride + value.width),
        flops=lambda rows, kv_len: 6 * rows * shape.key_dim * value.width,
    )
