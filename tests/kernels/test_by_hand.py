"""The kernels by hand, as a user calls them: every public function of `infer.kernels.functions`."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from infer.kernels import functions
from infer.kernels.checks.check import FAMILIES
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device

LIMIT = 1e-10
RNG = np.random.default_rng(7)
OTHERS = {"profile", "rope_table", "validate"}  # which run no kernel on arrays
KERNELS = sorted({*functions.__all__} - OTHERS)


def normal(*shape: int) -> NDArray[Any]:
    return RNG.standard_normal(shape, np.float32)


def positive(*shape: int) -> NDArray[Any]:
    return abs(normal(*shape))


TABLE = functions.rope_table([1.0, 0.1, 0.01], 9)  # of 6 dimensions
X = normal(3, 16)
Q, KEYS, VALUES = normal(3, 32), normal(5, 16), normal(5, 16)
HEADS = {"n_kv_heads": 2, "scale": 0.3}
PROJECTED = {"x": X, "weight": normal(6, 16), "bias": normal(6), "residual": normal(3, 6)}

# Arguments of each, which fit.
CALLS: dict[str, dict[str, Any]] = {
    "activation": {"x": X, "function": "gelu"},
    "attention": {"q": Q, "k": KEYS, "v": VALUES, "sinks": normal(4), **HEADS},
    "attention_matrix": {"q": Q, "k": KEYS, "v": VALUES, **HEADS},
    "attention_prompts": {"prompts": [(Q, KEYS, VALUES), (Q[:1], KEYS, VALUES)], **HEADS},
    "attention_scores": {"q": Q, "k": KEYS, **HEADS},
    "attention_softmax": {"x": normal(3, 2, 5)},
    "attention_tiled": {"q": Q, "k": KEYS, "v": VALUES, "sinks": normal(4), **HEADS},
    "clip": {"x": X, "limit": 0.5},
    "delta_rule": {
        **{"q": normal(3, 2, 8), "k": normal(3, 2, 8), "v": normal(3, 4, 12)},
        **{"gates": normal(3, 8), "a_log": normal(4), "dt_bias": normal(4)},
        "state": normal(4, 8, 12),
    },
    "elementwise_add": {"a": X, "b": X},
    "elementwise_mul": {"a": X, "b": X},
    "embedding": {"ids": [6, 0, 2], "weight": normal(7, 16)},
    "expert_down": {
        **{"x": normal(3, 2, 8), "logits": normal(3, 5), "weight": normal(5, 16, 8)},
        **{"bias": normal(5, 16), "residual": X},
    },
    "expert_gate_up": {
        **{"x": X, "logits": normal(3, 5), "weight": normal(5, 12, 16), "slots": 2},
        **{"bias": normal(5, 12), "norm": (positive(16), 1e-5)},
    },
    "head_linear": {"x": X, "weight": normal(10, 8), "heads": 2},
    "hidden_before": {"kept": normal(1, 16, 8), "x": normal(3, 8)},
    "keep_hidden": {"x": normal(3, 8), "kept": normal(1, 16, 8)},
    "kv_write": {"k": KEYS, "v": VALUES, "n_kv_heads": 2, "position": 3},
    "latent_write": {"x": X, "table": TABLE, "weight": positive(10), "eps": 1e-5},
    "layernorm": {"x": X, "weight": normal(8), "bias": normal(8), "eps": 1e-5},
    "lora_down": {
        **{"x": X, "weights": normal(2, 4, 16), "adapters": [0, 1, 2]},
        "norm": (positive(16), 1e-5),
    },
    "lora_up": {
        **{"x": normal(3, 4), "weights": normal(2, 16, 4), "adapters": [0, 1, 2]},
        "residual": X,
    },
    "matmul": {"a": X, "b": normal(16, 6)},
    "matmul_lanes": PROJECTED,
    "matmul_matrix": {"x": normal(9, 16), "weight": normal(6, 16), "bias": normal(6)},
    "matmul_rows": PROJECTED,
    "matmul_tiled": PROJECTED,
    "matmul_vec": PROJECTED | {"norm": (positive(16), 1e-5)},
    "position_embedding": {"weight": normal(7, 16), "rows": 3, "position": 2},
    "position_scale": {"x": X, "beta": 0.1, "interval": 2, "position": 4},
    "rmsnorm": {"x": X, "weight": normal(8), "eps": 1e-5, "gate": X},
    "rope": {"x": X, "table": TABLE, "head_dim": 8, "position": 6},
    "rope_attention": {
        **{"x": normal(3, 64), "table": TABLE, "k": KEYS, "v": VALUES, "n_heads": 4, **HEADS},
        "norms": (positive(8), positive(8), 1e-5),
    },
    "rope_kv_write": {"x": normal(3, 64), "table": TABLE, "n_heads": 4, "n_kv_heads": 2},
    "route": {
        **{"logits": normal(3, 5), "slots": 2, "normalize": True, "sigmoid": True},
        **{"correction": normal(5), "expert_scales": normal(5)},
    },
    "sample": {"logits": normal(3, 40), "allowed": [3, 5], "prompt_ids": [1, 2]},
    "scale": {"x": X, "factor": 0.5},
    "short_conv": {
        **{"x": X, "weight": normal(16, 4), "bias": normal(16), "state": normal(3, 16)},
    },
    "sigmoid_gate": {"x": X, "gate": normal(3, 1)},
    "silu": {"x": X},
    "softcap": {"x": X, "cap": 3.0},
    "softmax": {"x": X},
    "ssm_scan": {
        **{"x": normal(3, 4, 8), "b": normal(3, 2, 12), "c": normal(3, 2, 12)},
        **{"z": normal(3, 4, 8), "dt": normal(3, 4), "heads": normal(3, 4)},
        **{"state": normal(4, 12, 8), "norm": (positive(32), 1e-5), "projection": normal(6, 32)},
    },
    "take_rows": {"x": X, "rows": [2, 0]},
    "weighted_sum": {"p": positive(3, 4, 5), "v": VALUES, "n_kv_heads": 2},
    "xielu": {"x": X, "shape": [0.3, -0.8, 0.5, -1e-6]},
}


def call(name: str, device: Device, **given: Any) -> Any:
    function: Callable[..., Any] = getattr(functions, name)
    return function(device, **given)


def results(value: Any) -> list[NDArray[Any]]:
    return list(value) if isinstance(value, tuple) else [value]


def as_lists(value: Any) -> Any:
    """Arrays as lists, also within tuples and lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value)(map(as_lists, value)) if isinstance(value, tuple | list) else value


def arrays_of(name: str) -> list[str]:
    """The arguments that are arrays."""
    return [key for key, value in CALLS[name].items() if isinstance(value, np.ndarray)]


def test_every_function_of_a_family_is_public_and_called_here() -> None:
    names = (name for family in FAMILIES for name in vars(family))
    runs = {name.removeprefix("run_") for name in names if name.startswith("run_")}
    assert sorted(CALLS) == KERNELS == sorted(runs)


def test_editors_and_type_checkers_see_every_function() -> None:
    """They read the file, and do not run it."""
    tree = ast.parse(Path(inspect.getfile(functions)).read_text(encoding="utf-8"))
    bound = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    assert {*functions.__all__} <= bound


@pytest.mark.parametrize("name", KERNELS)
def test_the_help_names_each_argument_and_its_shape(name: str) -> None:
    """In the signature, where editors show it; and in the docstring, in words."""
    function = getattr(functions, name)
    device, *parameters = inspect.signature(function).parameters.values()
    assert device.name == "device"
    assert "timings" in [each.name for each in parameters]
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters)
    for each in parameters:
        if each.name in arrays_of(name):
            assert re.fullmatch(r"\[.+\]( \| None)?", str(each.annotation)), each
    assert "[" in str(inspect.signature(function).return_annotation)
    assert "[" in function.__doc__


@pytest.mark.parametrize("name", KERNELS)
def test_lists_are_taken_as_arrays_are(device: Device, name: str) -> None:
    of_arrays = results(call(name, device, **CALLS[name]))
    of_lists = results(call(name, device, **{k: as_lists(v) for k, v in CALLS[name].items()}))
    for one, other in zip(of_arrays, of_lists, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", KERNELS)
def test_what_does_not_fit_is_refused_by_the_name_of_the_function(
    device: Device, name: str
) -> None:
    """No array may be a number, complex, of texts, ragged, or empty, or have one axis more."""

    def refused(**given: Any) -> None:
        with pytest.raises(ShaderError) as error:
            call(name, device, **{**CALLS[name], **given})
        assert str(error.value).startswith(f"{name}: ")

    refused(dtyp="f32")
    refused(timing={})
    with pytest.raises(ShaderError, match=f"^{name}: "):
        getattr(functions, name)(device)
    with pytest.raises(ShaderError, match=f"^{name}: .*must be a Device, not NoneType"):
        getattr(functions, name)(None, **CALLS[name])
    parameters = inspect.signature(getattr(functions, name)).parameters
    for key in arrays_of(name):
        array = CALLS[name][key]
        for wrong in (
            *(3.0, "x", None, array + 1j, array.astype(str), [[1.0], [2.0, 3.0]]),
            *(array[None], array[:0], array.ravel()[: array.size * (array.ndim > 1)]),
        ):
            if wrong is not None or "None" not in str(parameters[key].annotation):
                refused(**{key: wrong})
    for key, value in CALLS[name].items():
        if isinstance(value, int) and not isinstance(value, bool):
            for number in (-1, 1.5, "1"):
                refused(**{key: number})
        elif isinstance(value, float):
            refused(**{key: "1"})
        elif isinstance(value, str):
            refused(**{key: "unknown"})
        elif isinstance(value, tuple):
            refused(**{key: value[0]})


@pytest.mark.parametrize("name", KERNELS)
def test_an_array_of_another_length_is_refused_or_computed(device: Device, name: str) -> None:
    """Nothing is read that was not given: buffers are filled with NaN before."""
    filled = not any(np.isnan(each).any() for each in results(call(name, device, **CALLS[name])))
    for key in arrays_of(name):
        array = CALLS[name][key]
        for axis in range(array.ndim):
            for other in (np.delete(array, 0, axis), np.concatenate([array, array], axis)):
                given = {**CALLS[name], key: other}
                try:
                    found = results(call(name, device, **given))
                except ShaderError:
                    continue
                assert not filled or not any(np.isnan(each).any() for each in found), (key, axis)


# Against numpy in float64


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 16, 6), (70, 33, 9), (9, 5, 130)])
def test_matmul_is_the_product_of_two_matrices(device: Device, shape: tuple[int, ...]) -> None:
    m, k, n = shape
    a, b = normal(m, k), normal(k, n)
    assert nmse(functions.matmul(device, a, b), a.astype(np.float64) @ b) <= LIMIT


@pytest.mark.parametrize("shape", [(1, 1), (6, 4), (4, 6), (3, 1000), (300, 7)])
def test_softmax_is_of_each_row(device: Device, shape: tuple[int, int]) -> None:
    x = 5 * normal(*shape)
    e = np.exp(x.astype(np.float64))
    y = functions.softmax(device, x)
    assert nmse(y, e / e.sum(1, keepdims=True)) <= LIMIT
    np.testing.assert_allclose(functions.softmax(device, 1000 * x).sum(1), 1, rtol=1e-5)


def test_silu(device: Device) -> None:
    x = 5 * normal(3, 67)
    assert nmse(functions.silu(device, x), x / (1 + np.exp(-x.astype(np.float64)))) <= LIMIT


def test_weighted_sum_is_of_as_many_values_as_weights(device: Device) -> None:
    p, v = positive(2, 4, 5), normal(5, 16)
    with pytest.raises(ShaderError, match=r"weighted_sum: v must be .* with kv_len = 5, not \[4"):
        functions.weighted_sum(device, p, v[:4], n_kv_heads=2)
    with pytest.raises(ShaderError, match="3 heads of p cannot share 2 KV heads"):
        functions.weighted_sum(device, p[:, :3], v, n_kv_heads=2)
    with pytest.raises(ShaderError, match="2 rows, which cannot be the last of 1 positions"):
        functions.weighted_sum(device, p[..., :1], v[:1], n_kv_heads=2)
    seen = np.tril(np.ones((5, 5)))[-2:, None]  # the last two rows see all before them
    expected = np.einsum(
        "rhp,phd->rhd", p * seen, v.astype(np.float64).reshape(5, 2, 8).repeat(2, 1)
    )
    assert (
        nmse(functions.weighted_sum(device, p, v, n_kv_heads=2), expected.reshape(2, 32)) <= LIMIT
    )


def test_rope_fits_its_table(device: Device) -> None:
    for head_dim in (4, 5):
        with pytest.raises(
            ShaderError, match=f"rope: .* 6 dimensions, more than the {head_dim} of"
        ):
            functions.rope(device, normal(3, 2 * head_dim), TABLE, head_dim=head_dim)
    x = normal(3, 7)  # of an odd head the table may rotate a part
    y = functions.rope(device, x, TABLE, head_dim=7, position=1)
    turn = TABLE[1:4].astype(np.float64) @ [1, 1j]
    z = (x[:, :3] + 1j * x[:, 3:6]) * turn
    assert nmse(y, np.concatenate([z.real, z.imag, x[:, 6:]], axis=1)) <= LIMIT
    with pytest.raises(ShaderError, match=r"rope: table must be \[10 or more positions"):
        functions.rope(device, normal(3, 8), TABLE, head_dim=8, position=7)
    with pytest.raises(ShaderError, match=r"rope: x must be .* with head_dim = 8, not \[3, 12\]"):
        functions.rope(device, normal(3, 12), TABLE, head_dim=8)
    wrong: list[tuple[Any, Any, str]] = [([1.0], 0, "positions"), ([1.0], 2.5, "positions")]
    wrong += [([], 3, "frequencies"), ([[1.0]], 3, "frequencies"), (["x"], 3, "frequencies")]
    for frequencies, positions, name in wrong:
        with pytest.raises(ShaderError, match=f"rope_table: {name} must be"):
            functions.rope_table(frequencies, positions)


def test_softmax_of_attention_has_a_position_for_each_row(device: Device) -> None:
    with pytest.raises(ShaderError, match="6 rows, which cannot be the last of 4 positions"):
        functions.attention_softmax(device, normal(6, 2, 4))
    with pytest.raises(ShaderError, match=r"softmax: x must be \[rows, n\], not \[3, 2, 4\]"):
        functions.softmax(device, normal(3, 2, 4))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("embedding", {"ids": [0, 7]}, "ids must be from 0 to 6, not 7"),
        ("embedding", {"ids": [0.5]}, "ids must be whole numbers"),
        ("embedding", {"dtype": "int3"}, "dtype must be one of f32, f16, bf16, q8, q4, not 'int3'"),
        ("position_embedding", {"position": 5}, "rows 5 to 7 are not among 7"),
        ("take_rows", {"rows": [3]}, "rows must be from 0 to 2, not 3"),
        ("lora_down", {"adapters": [0, 1, 3]}, "adapters must be from 0 to 2, not 3"),
        ("sample", {"allowed": [40]}, "allowed must be from 0 to 39, not 40"),
        ("sample", {"drafts": [1]}, "drafts must be of 2 rows"),
        ("sample", {"tuning": None}, "no argument 'tuning'"),
        ("attention", {"q": normal(6, 32)}, "q has 6 rows, more than the 5 of k and v"),
        ("attention", {"q": normal(3, 40)}, "n_heads a multiple of 2 and head_dim 8"),
        ("attention", {"kv_dtype": "f8"}, "kv_dtype must be one of f16, f32, q8, not 'f8'"),
        ("attention", {"window": -1}, "window must be a whole number from 0 on"),
        ("attention_prompts", {"prompts": [(Q[0], KEYS, VALUES)]}, r"must be \[rows, width\]"),
        ("kv_write", {"k": normal(5, 24), "v": normal(5, 24)}, "multiple of 8, not 12"),
        ("activation", {"x": normal(3, 7), "gated": True}, "7 is odd"),
        ("matmul_vec", {"weight": normal(6, 15)}, r"\[outputs, k\] with k = 16, not \[6, 15\]"),
        ("matmul_matrix", {"x": X}, "9 rows or more, not 3: use matmul_vec"),
        ("rmsnorm", {"epps": 1.0}, r"no argument 'epps' \(was 'eps' meant\?\); it takes x, weight"),
        ("softcap", {"cap": 0.0}, "cap must be above 0"),
    ],
)
def test_a_message_says_what_would_fit(
    device: Device, name: str, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShaderError, match=f"^{name}: .*{message}"):
        call(name, device, **(CALLS[name] | wrong))


def test_profile_times_what_samples(device: Device) -> None:
    times = functions.profile(functions.sample, device, CALLS["sample"]["logits"])
    assert times
    assert all(0 < each < math.inf for each in times.values())
