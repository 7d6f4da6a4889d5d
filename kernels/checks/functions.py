"""The kernels by hand: numpy arrays in, numpy arrays out, one function for each kernel.

    >>> from infer.kernels import Device, functions
    >>> with Device.open() as device:
    ...     y = functions.rmsnorm(device, x, weight, eps=1e-6)
    ...     seconds = functions.profile(functions.rmsnorm, device, x, weight, eps=1e-6)

Every function traces its op and lowers it as a model's forward is lowered, so what runs is what the
engine runs. Docstrings give the shapes of arrays. These may be of any type of real numbers, or
lists: they are taken as float32, and results are float32. `dtype` is how a matrix is stored on the
GPU: f32, f16, bf16, q8 or q4, which are rounded to. Where matrices are multiplied, integers of q8
and q4 are multiplied with activations rounded to int8.

All take three more options (forward.Options): fuse=False, for a kernel for each op; tuning, which
chooses the variants; timings, a dictionary that is filled with the seconds of each kernel. `sample`
takes timings alone. Arguments that do not fit raise ShaderError, which says of which function. The
functions allocate, copy and wait, so they are for trying and testing: `profile` says what a kernel
itself takes.

The functions are the `run_NAME` of the families of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infer.kernels.checks.attention_check import run_attention as attention
from infer.kernels.checks.attention_check import run_attention_matrix as attention_matrix
from infer.kernels.checks.attention_check import run_attention_prompts as attention_prompts
from infer.kernels.checks.attention_check import run_attention_scores as attention_scores
from infer.kernels.checks.attention_check import run_attention_softmax as attention_softmax
from infer.kernels.checks.attention_check import run_attention_tiled as attention_tiled
from infer.kernels.checks.attention_check import run_kv_write as kv_write
from infer.kernels.checks.attention_check import run_latent_write as latent_write
from infer.kernels.checks.attention_check import run_rope_attention as rope_attention
from infer.kernels.checks.attention_check import run_rope_kv_write as rope_kv_write
from infer.kernels.checks.attention_check import run_softmax as softmax
from infer.kernels.checks.attention_check import run_weighted_sum as weighted_sum
from infer.kernels.checks.elementwise_check import run_activation as activation
from infer.kernels.checks.elementwise_check import run_clip as clip
from infer.kernels.checks.elementwise_check import run_elementwise_add as elementwise_add
from infer.kernels.checks.elementwise_check import run_elementwise_mul as elementwise_mul
from infer.kernels.checks.elementwise_check import run_position_scale as position_scale
from infer.kernels.checks.elementwise_check import run_scale as scale
from infer.kernels.checks.elementwise_check import run_sigmoid_gate as sigmoid_gate
from infer.kernels.checks.elementwise_check import run_silu as silu
from infer.kernels.checks.elementwise_check import run_softcap as softcap
from infer.kernels.checks.elementwise_check import run_xielu as xielu
from infer.kernels.checks.embedding_check import run_embedding as embedding
from infer.kernels.checks.embedding_check import run_position_embedding as position_embedding
from infer.kernels.checks.embedding_check import run_take_rows as take_rows
from infer.kernels.checks.experts_check import run_expert_down as expert_down
from infer.kernels.checks.experts_check import run_expert_gate_up as expert_gate_up
from infer.kernels.checks.experts_check import run_route as route
from infer.kernels.checks.hidden_check import run_hidden_before as hidden_before
from infer.kernels.checks.hidden_check import run_keep_hidden as keep_hidden
from infer.kernels.checks.linear_check import run_head_linear as head_linear
from infer.kernels.checks.linear_check import run_matmul as matmul
from infer.kernels.checks.linear_check import run_matmul_lanes as matmul_lanes
from infer.kernels.checks.linear_check import run_matmul_matrix as matmul_matrix
from infer.kernels.checks.linear_check import run_matmul_rows as matmul_rows
from infer.kernels.checks.linear_check import run_matmul_tiled as matmul_tiled
from infer.kernels.checks.linear_check import run_matmul_vec as matmul_vec
from infer.kernels.checks.lora_check import run_lora_down as lora_down
from infer.kernels.checks.lora_check import run_lora_up as lora_up
from infer.kernels.checks.norm_check import run_layernorm as layernorm
from infer.kernels.checks.norm_check import run_rmsnorm as rmsnorm
from infer.kernels.checks.recurrent_check import run_delta_rule as delta_rule
from infer.kernels.checks.recurrent_check import run_short_conv as short_conv
from infer.kernels.checks.recurrent_check import run_ssm_scan as ssm_scan
from infer.kernels.checks.rope_check import rope_table
from infer.kernels.checks.rope_check import run_rope as rope
from infer.kernels.checks.sampler_check import run_sample as sample
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.shader import Param, render_text


def profile(
    function: Callable[..., Any], device: Device, *args: Any, **kwargs: Any
) -> dict[str, float]:
    """The seconds that each kernel takes in a call of one of these functions, by its label.

    Raises DeviceError where the adapter has no timestamps.
    """
    timings: dict[str, float] = {}
    function(device, *args, timings=timings, **kwargs)
    return timings


def validate(
    wgsl: str, device: Device | None = None, *, name: str = "shader", **params: Param
) -> list[str]:
    """The preprocessor's and the compiler's messages about WGSL text, `name:line:column: message`;
    none if it is valid. params: those that the text declares. device: by default the best there is.
    """
    try:
        shader = render_text(wgsl, name, **params)
    except ShaderError as error:
        return [str(error)]
    if device is not None:
        return device.validate(shader, name)
    with Device.open() as own:
        return own.validate(shader, name)


__all__ = [
    "activation",
    "attention",
    "attention_matrix",
    "attention_prompts",
    "attention_scores",
    "attention_softmax",
    "attention_tiled",
    "clip",
    "delta_rule",
    "elementwise_add",
    "elementwise_mul",
    "embedding",
    "expert_down",
    "expert_gate_up",
    "head_linear",
    "hidden_before",
    "keep_hidden",
    "kv_write",
    "latent_write",
    "layernorm",
    "lora_down",
    "lora_up",
    "matmul",
    "matmul_lanes",
    "matmul_matrix",
    "matmul_rows",
    "matmul_tiled",
    "matmul_vec",
    "position_embedding",
    "position_scale",
    "profile",
    "rmsnorm",
    "rope",
    "rope_attention",
    "rope_kv_write",
    "rope_table",
    "route",
    "sample",
    "scale",
    "short_conv",
    "sigmoid_gate",
    "silu",
    "softcap",
    "softmax",
    "ssm_scan",
    "take_rows",
    "validate",
    "weighted_sum",
    "xielu",
]
