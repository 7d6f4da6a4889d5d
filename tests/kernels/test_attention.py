"""Attention of a few rows and of many, with what is fused into it, and the cache that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from conftest import LEAST, OpenDevice
from test_kernels import (
    EPS,
    INT8_LIMIT,
    LIMIT,
    SETTINGS,
    Case,
    Factors,
    Forced,
    covering,
    normal,
    prepared,
    rules,
    settings_of,
    thirds,
)

from infer.kernels.checks import attention_check, functions, linear_check, norm_check, rope_check
from infer.kernels.checks.arrays import Array, from_rows, rounded, to_gpu, to_rows
from infer.kernels.checks.attention_check import kv_step, nearest_output
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import exact_weight, int8_rows
from infer.kernels.checks.reference import nmse
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.record import run
from infer.kernels.lowering.arena import Arena
from infer.kernels.lowering.target import StepKind
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.kernels.ops.attention import (
    AttentionVariant,
    attention_joined_variant,
    attention_variant,
)
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import KV_DTYPES, PAGE, KVCache, KVShape, kept
from infer.kernels.state.step import HEADER, ROW, pack_step

ATTENTION: Factors = SETTINGS | {
    "rows": (1, 2, 5, 8, 9, 40, 130),
    "heads": ((1, 1), (2, 2), (1, 3), (2, 4), (1, 5), (1, 6), (3, 7), (1, 8)),  # KV heads, group
    "head_dim": (8, 24, 64, 80, 128, 256),
    "past": (0, 1, 250, 256, 513, 1100),
    "window": (0, 1, 33, 300),
    "softcap": (0.0, 0.7),
    "sinks": (None, 0.0, 5.0),
    "kv_dtype": ("f16", "f32", "q8"),
    "fuse": (True, False),
    "joined": (True, False),
}


_JOINED = 700  # positions


def attention_tuning(device: Device, joined: bool) -> Tuning:
    """The rules of this device without its matrices (test_attention_matrix.py has those), but that
    attention joins a short context, as on a GPU, or none."""

    def one(tuning: Tuning, variant: AttentionVariant, *call: int) -> AttentionVariant | None:
        own = replace(variant, heads=1, splits=1, min_split=_JOINED, max_split=_JOINED)
        return own if joined else None

    tuning = Tuning(device)
    tuning.matrices, tuning.instead = (), {attention_joined_variant: one}
    return tuning


def attention_error(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    past: int,
    window: int,
    kv_dtype: str,
    softcap: float = 0.0,
    sinks: float | None = None,
    joined: bool = True,
    **options: Any,
) -> float:
    """sinks: what they are around, if there are any. joined: if the context is short enough."""
    n_kv_heads, group = heads
    q = 2 * normal(rng, rows, n_kv_heads * group * head_dim)
    width = n_kv_heads * head_dim  # of keys and values that no cache rounds again
    k, v = (kept(normal(rng, past + rows, width), head_dim, kv_dtype) for _ in range(2))
    scale = head_dim**-0.5
    logits = None if sinks is None else sinks + normal(rng, n_kv_heads * group)
    function = functions.attention if rows <= 8 else functions.attention_tiled
    y = function(
        device,
        q,
        k,
        v,
        n_kv_heads=n_kv_heads,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=logits,
        kv_dtype=kv_dtype,
        tuning=attention_tuning(device, joined),
        **options,
    )
    n_heads = n_kv_heads * group
    return nmse(y, attention_check.attention(q, k, v, n_heads, scale, window, softcap, logits))


@covering(
    ATTENTION,
    rows=(1, 8, 9, 130),
    heads=((1, 1), (2, 2), (1, 5), (3, 7)),
    head_dim=(8, 64, 80, 128),
    past=(0, 256, 513, 1100),
)
def test_attention(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        own = {name: value for name, value in case.items() if name not in SETTINGS}
        assert attention_error(open_device(settings_of(case)), rng, **own) <= LIMIT, case


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("settings", [Settings(), LEAST])
def test_attention_of_the_widest_heads(
    open_device: OpenDevice, rng: np.random.Generator, settings: Settings, rows: int
) -> None:
    device = open_device(settings)
    assert attention_error(device, rng, rows, (1, 2), 512, 30, 0, "f16") <= LIMIT


@pytest.mark.parametrize(
    ("rows", "settings", "kv_dtype"),
    [
        *((1, Settings(), "f16"), (3, LEAST, "q8"), (40, Settings(), "f32")),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in product((1, 3, 40), (Settings(), LEAST), KV_DTYPES)
        ),
    ],
)
def test_attention_to_latents(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, settings: Settings, kv_dtype: str
) -> None:
    """DeepSeek's models cache 64 dimensions of a key and a latent of 512, which are the values too.
    A row alone reads them in one split, or in several."""
    device = open_device(settings)
    q, keys = normal(rng, rows, 4 * 576), kept(normal(rng, rows + 530, 576), 576, kv_dtype)
    expected = attention_check.attention(q, keys, keys, 4, 0.07)
    function = functions.attention if rows <= 8 else functions.attention_tiled
    for joined in (True, False)[: 1 + (rows == 1)]:
        y = function(
            device,
            q,
            keys[:, :64],
            keys[:, 64:],
            n_kv_heads=1,
            scale=0.07,
            kv_dtype=kv_dtype,
            latent=True,
            tuning=attention_tuning(device, joined),
        )
        assert nmse(y, expected) <= LIMIT


def test_attention_of_a_sharp_distribution(device: Device, rng: np.random.Generator) -> None:
    """Scores of several hundred: exp must not overflow, and the best position takes all."""
    q = 100 * normal(rng, 3, 64)
    k, v = normal(rng, 300, 64), normal(rng, 300, 64)
    for function in (functions.attention, functions.attention_tiled):
        y = function(device, q, k, v, n_kv_heads=1, scale=1.0)
        scores = np.where(attention_check.visible(3, 300), q.astype(np.float64) @ k.T, -np.inf)
        assert nmse(y, v[scores.argmax(1)]) <= 1e-8


def value_step(values: Array, head_dim: int, kv_dtype: str) -> Array:
    """How far from values, which no arithmetic precedes, a cache may be: nothing in f32, and in q8
    as far as numpy's, but for quotients whose last bits WGSL leaves open."""
    if kv_dtype == "f16":
        return kv_step(values, head_dim, kv_dtype)
    open_bits = 1e-6 * abs(values).max() if kv_dtype == "q8" else 0.0
    return open_bits + abs(kept(values, head_dim, kv_dtype) - values)


@covering(
    SETTINGS
    | {
        "rows": (1, 5, 9),
        "heads": ((1, 1), (2, 3), (4, 2)),
        "head_dim": (8, 40, 64, 128, 256),
        "norms": (False, True),
        "rotary": (1, 2),
        "interleaved": (False, True),
        "kv_dtype": ("f16", "f32", "q8"),
    }
)
def test_rope_kv_write(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    position = 252
    for case in cases:
        rows, d, (n_kv_heads, group) = case["rows"], case["head_dim"], case["heads"]
        kv_width = n_kv_heads * d
        frequencies = 100.0 ** (-np.arange(d // 2 // case["rotary"]) / d)
        x = normal(rng, rows, (group + 2) * kv_width)
        q_norm, k_norm = normal(rng, d), normal(rng, d)
        device = open_device(settings_of(case))
        normed = case["norms"] and device.limits.storage_buffers > 8
        y, *cached = functions.rope_kv_write(
            device,
            x,
            functions.rope_table(frequencies, 300),
            n_heads=n_kv_heads * group,
            n_kv_heads=n_kv_heads,
            position=position,
            interleaved=case["interleaved"],
            norms=(q_norm, k_norm, EPS) if normed else None,
            kv_dtype=case["kv_dtype"],
        )
        q, k, v = np.split(x, [group * kv_width, (group + 1) * kv_width], axis=1)
        if normed:
            q, k = norm_check.rmsnorm(q, q_norm, EPS), norm_check.rmsnorm(k, k_norm, EPS)
        positions = np.arange(position, position + rows)
        q, k = (
            rope_check.rope(part, positions, frequencies, d, case["interleaved"]) for part in (q, k)
        )
        keys, values = (
            part[:, position : position + rows].swapaxes(0, 1).reshape(rows, kv_width)
            for part in cached
        )
        assert nmse(y, q) <= LIMIT, case
        assert np.all(abs(values - v) <= value_step(v, d, case["kv_dtype"])), case
        assert np.all(abs(keys - k) <= kv_step(k, d, case["kv_dtype"])), case
        for part in cached:  # nothing else was written
            assert np.isnan(part[:, :position]).all(), case
            assert np.isnan(part[:, position + rows :]).all(), case


@covering(
    SETTINGS
    | {
        "heads": ((1, 1), (2, 2), (1, 3), (2, 4), (1, 5), (3, 7), (1, 8)),
        "head_dim": (8, 16, 24, 64, 80, 128, 256),
        "past": (0, 1, 31, 32, 255, 256, 700),
        "window": (0, 1, 33, 300),
        "softcap": (0.0, 0.7),
        "norms": (0, 2, 3),
        "kv_parts": (2, 2, 1, 0),
        "rotate_first": (False, True),
        "rotary": (1, 2, None),
        "interleaved": (False, True),
        "kv_dtype": ("f16", "f32", "q8"),
        "storage_buffers": (None, 8),
        "rows": (1, 1, 3),
        "joined": (True, False),
    },
    heads=((1, 1), (2, 2), (1, 5), (3, 7)),
    head_dim=(8, 24, 64, 80, 128),
    past=(0, 31, 256, 700),
)
def test_rope_attention(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        own = {name: value for name, value in case.items() if name not in SETTINGS}
        bindings = own.pop("storage_buffers")
        device = open_device(replace(settings_of(case), storage_buffers=bindings))
        own["tuning"] = attention_tuning(device, own.pop("joined"))
        assert rope_attention_error(device, rng, **own) <= LIMIT, case


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_parts", "interleaved", "rows", "settings"),
    [
        ((2, 1), 64, 2, False, 1, Settings()),
        ((2, 1), 64, 2, False, 1, LEAST),
        ((3, 7), 128, 2, False, 1, Settings()),  # more vectors than invocations
        ((3, 7), 128, 2, False, 3, Settings()),
        ((2, 4), 24, 1, True, 1, Settings()),
        ((2, 4), 24, 1, True, 3, Settings()),
        ((1, 5), 40, 0, False, 1, Settings()),
    ],
)
def test_attention_norms_whole_rows(
    open_device: OpenDevice,
    rng: np.random.Generator,
    heads: tuple[int, int],
    head_dim: int,
    kv_parts: int,
    interleaved: bool,
    rows: int,
    settings: Settings,
) -> None:
    device = open_device(settings)
    for joined in (True, False) if (rows, kv_parts) == (1, 2) else (False,):
        error = rope_attention_error(
            device,
            rng,
            heads,
            head_dim,
            70 if joined else 600,
            0,
            "f16",
            norms=2,
            wide=True,
            kv_parts=kv_parts,
            interleaved=interleaved,
            rows=rows,
            tuning=attention_tuning(device, joined),
        )
        assert error <= LIMIT, joined


def rope_attention_error(
    device: Device,
    rng: np.random.Generator,
    heads: tuple[int, int],
    head_dim: int,
    past: int,
    window: int,
    kv_dtype: str,
    softcap: float = 0.0,
    norms: int = 0,
    wide: bool = False,
    kv_parts: int = 2,
    rotate_first: bool = False,
    rotary: int | None = 1,
    interleaved: bool = False,
    rows: int = 1,
    **options: Any,
) -> float:
    """Returns the error of the output, given the cache, which must be right as well. rotary: one in
    so many dimensions turns, or none. norms: of queries and keys, or of values too; wide: those of
    queries and keys are of whole rows. kv_parts: keys and values in the projection, keys that are
    the values too, or neither."""
    d, (n_kv_heads, group) = head_dim, heads
    kv_width, n_heads = n_kv_heads * d, n_kv_heads * group
    frequencies = 100.0 ** (-np.arange(d // 2 // (rotary or 1)) / d)
    x = normal(rng, rows, (group + kv_parts) * kv_width)
    known = [normal(rng, past + (0 if kv_parts else rows), kv_width) for _ in "kv"]
    q_width, k_width = (group * kv_width, kv_width) if wide else (d, d)
    q_norm, k_norm, v_norm = (normal(rng, width) for width in (q_width, k_width, d))
    y, *cached = functions.rope_attention(
        device,
        x,
        functions.rope_table(frequencies, past + rows) if rotary else None,
        *known,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        scale=d**-0.5,
        window=window,
        softcap=softcap,
        interleaved=interleaved,
        norms=(q_norm, k_norm, EPS) if norms else None,
        v_norm=v_norm if norms == 3 else None,
        rotate_first=rotate_first,
        kv_dtype=kv_dtype,
        **options,
    )
    q, *kv = np.split(x, [group * kv_width, (group + 1) * kv_width][: max(1, kv_parts)], axis=1)
    k, v = (kv[0], kv[kv_parts - 1]) if kv_parts else (part[past:] for part in known)
    positions = np.arange(past, past + rows)

    def prepared_head(part: Array, norm: Array) -> Array:
        for turns in (rotate_first, not rotate_first):
            if turns and rotary:
                part = rope_check.rope(part, positions, frequencies, d, interleaved)
            if not turns and norms:
                part = norm_check.rmsnorm(part, norm, EPS)
        return part

    q, k = prepared_head(q, q_norm), prepared_head(k, k_norm) if kv_parts else k
    v = norm_check.rmsnorm(v, v_norm, EPS) if kv_parts and norms == 3 else v
    total = past + rows
    keys, values = (part[:, :total].swapaxes(0, 1).reshape(total, kv_width) for part in cached)
    for part, before in zip((keys, values), known, strict=True):
        assert (part[: len(before)] == kept(before, d, kv_dtype)).all()
    if kv_parts:
        step = kv_step if norms == 3 else value_step
        assert np.all(abs(values[past:] - v) <= step(v, d, kv_dtype))
        assert np.all(abs(keys[past:] - k) <= kv_step(k, d, kv_dtype))
    assert all(np.isnan(part[:, total:]).all() for part in cached)  # nothing else was written

    def attend(k: Array, v: Array) -> Array:
        return attention_check.attention(q, k, v, n_heads, d**-0.5, window, softcap)

    return nmse(y, nearest_output(y, attend, (keys, values), (k, v), kv_dtype))


def test_packing_may_be_dropped_of_every_second_value() -> None:
    """Mesa 25's compiler drops the rounding where a kernel unpacks at once what it has packed."""
    own = np.array([[1.0001, 2.0001, 3.0001, 4.0001]])
    cached = own.astype(np.float16).astype(np.float64)
    y = np.where([False, True, False, True], own, cached)
    nearest = nearest_output(y, lambda k, v: v, (cached, cached), (own, own), "f16")
    assert (nearest == y).all()


@pytest.mark.parametrize("settings", [Settings(), LEAST])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("head_dim", [8, 48, 128])  # half a block has two heads, or one
def test_attention_that_goes_out_as_int8(
    open_device: OpenDevice,
    rng: np.random.Generator,
    head_dim: int,
    joined: bool,
    settings: Settings,
) -> None:
    device = open_device(settings)
    v, exact = int8_rows(rng, 1, 4 * head_dim)
    weight = exact_weight(rng, 40, 4 * head_dim, "q8")
    with device.scope():
        forward = Forward(device, 1, tuning=attention_tuning(device, joined))
        layer = KVCache(device, [(4, head_dim)], 8, dtype="f32").layers[0]
        q, k = (forward.input(normal(rng, *v.shape)) for _ in range(2))
        output = ops.attention(q, k, forward.input(v), layer, scale=1.0)
        y = forward.run(ops.linear(output, to_gpu(device, weight, "q8")))
    assert nmse(y, linear_check.matmul(exact, weight)) <= INT8_LIMIT


@pytest.mark.parametrize("settings", [Settings(), Settings(storage_buffers=8), LEAST])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 1), ("bf16", 3), ("bf16", 9), ("q8", 1)])
def test_attention_with_gates(
    open_device: OpenDevice,
    rng: np.random.Generator,
    dtype: str,
    rows: int,
    joined: bool,
    settings: Settings,
) -> None:
    device, d = open_device(settings), 16
    parts = [normal(rng, rows, heads * d) for heads in (4, 2, 2, 4)]
    weight = exact_weight(rng, 40, 4 * d, "q8")  # in bf16 too
    with device.scope():
        forward = Forward(device, rows, tuning=attention_tuning(device, joined))
        layer = KVCache(device, [(2, d)], 16, dtype="f32").layers[0]
        x = forward.input(np.concatenate(parts, axis=1))
        q, k, v, gates = ops.split(x, *(part.shape[1] for part in parts))
        y = ops.sigmoid_gate(ops.attention(q, k, v, layer, scale=0.25), gates)
        output = ops.linear(y, to_gpu(device, weight, dtype))
        kernels = {kernel.spec.name for kernel in forward.lower(output)[0].kernels}
        assert ("sigmoid_gate" in kernels) == (rows > 8 or not device.subgroups)
        y = forward.run(output)
    attended = attention_check.attention(*parts[:3], 4, 0.25, 0, 0.0)
    expected = prepared(attended / (1 + np.exp(-parts[3].astype(np.float64))), dtype)
    assert nmse(y, linear_check.matmul(expected, rounded(weight, dtype))) <= LIMIT


PAGES = 512 // PAGE  # of a sequence in the tests that follow


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("position", [0, 4, 255, 256, 299])
@pytest.mark.parametrize(("group", "joined"), [(1, False), (16, False), (16, True)])
def test_one_row_in_scattered_pages(
    device: Device,
    rng: np.random.Generator,
    group: int,
    joined: bool,
    position: int,
    alive: bool,
) -> None:
    """The row of a sequence turns, is cached and attends in one kernel; a stopped one writes
    nothing, and nothing reads the place that is written."""
    d, n_kv_heads, order = 16, 2, rng.permutation(2 * PAGES)
    keys, values = (normal(rng, 2, 512, n_kv_heads, d) for _ in range(2))
    x = normal(rng, 1, (group + 2) * n_kv_heads * d)
    frequencies = 10.0 ** -np.arange(0, 2, 2 / 8)
    q, k, v = np.split(x, [group * n_kv_heads * d, (group + 1) * n_kv_heads * d], axis=1)
    at = np.array([position])
    q, k = (rope_check.rope(part, at, frequencies, d) for part in (q, k))
    with device.scope():
        layer = scattered(device, [7, position], keys, values, order).layers[0]
        packed = pack_step([0], position, sequence=1)
        packed[HEADER.itemsize :].view(ROW)["alive"] = alive
        widths = [part.shape[1] for part in (q, k, v)]
        parts = ops.split(ops.input(device.upload(to_rows(x, 1)), x.shape[1]), *widths)
        rope = Rope(device.upload(functions.rope_table(frequencies, 300)), d)
        turned = [ops.rope(part, rope, d) for part in parts[:2]]
        output = ops.attention(*turned, parts[2], layer, scale=0.25)
        buffer = device.upload(np.full(q.shape, np.nan, np.float32))
        target = target_of(device, StepKind(1), tuning=attention_tuning(device, joined))
        lowering = lower(target, output, device.upload(packed), buffer)
        before = [device.read(part) for part in (layer.keys, layer.values)]
        plan = lowering.place(Arena(device))
        run(device, [*plan.body, *plan.head], 1, position + 1)
        y = from_rows(device.read(buffer), 1, q.shape[1])
        after = [device.read(part) for part in (layer.keys, layer.values)]
    names = [kernel.spec.name for kernel in lowering.kernels]
    assert names == ["attention_decode"] + ["attention_combine"] * (not joined)
    past = [
        np.concatenate([part[1, :position].reshape(position, n_kv_heads * d), own])
        for part, own in ((keys, k), (values, v))
    ]
    assert nmse(y, attention_check.attention(q, *past, n_kv_heads * group, 0.25)) <= LIMIT
    slot = order[PAGES + position // PAGE] * PAGE + position % PAGE
    for old, new, own in zip(before, after, (k, v), strict=True):
        expected, found = (part.reshape(-1, n_kv_heads, d) for part in (old.copy(), new))
        if alive:
            assert nmse(found[slot].reshape(1, -1), own) <= LIMIT
            expected[slot] = found[slot]
        assert np.array_equal(expected, found, equal_nan=True)


def scattered(
    device: Device, lengths: Sequence[int], keys: Array, values: Array, order: Array
) -> KVCache:
    """A cache of sequences [sequences, positions, heads, dim] of which `lengths` positions are
    known, in pages in that order."""
    _, positions, n_kv_heads, d = keys.shape
    cache = KVCache(
        device, [(n_kv_heads, d)], positions, sequences=len(lengths), dtype="f32", paged=True
    )
    layer = cache.layers[0]
    device.write(layer.pages, order.astype(np.uint32))
    for buffer, given in ((layer.keys, keys), (layer.values, values)):
        stored = np.full((layer.slots, n_kv_heads, d), np.nan, np.float32)
        for sequence, position in ((s, p) for s, n in enumerate(lengths) for p in range(n)):
            page = order[sequence * layer.pages_per_sequence + position // PAGE]
            stored[page * PAGE + position % PAGE] = given[sequence, position]
        device.write(buffer, stored)
    return cache


@pytest.mark.parametrize("fuse", [True, False])
def test_rows_of_several_sequences_in_scattered_pages(
    device: Device, rng: np.random.Generator, fuse: bool
) -> None:
    """Each row appends to its own sequence and attends to it; a stopped one writes nothing."""
    sequences, positions = np.array([2, 0, 1, 3]), np.array([39, 4, 299, 270])
    alive = np.array([1, 1, 1, 0])
    n_kv_heads, group, d = 2, 3, 16
    order = rng.permutation(4 * PAGES)
    keys, values = (normal(rng, 4, 512, n_kv_heads, d) for _ in range(2))
    lengths = [int(positions[sequences == s][0]) for s in range(4)]
    q = normal(rng, 4, n_kv_heads * group * d)
    with device.scope():
        cache = scattered(device, lengths, keys, values, order)
        packed = pack_step([0] * 4, 0)
        rows = packed[HEADER.itemsize :].view(ROW)
        rows["sequence"], rows["position"], rows["alive"] = sequences, positions, alive
        inputs = [
            ops.input(device.upload(to_rows(part.reshape(4, -1), 4)), part.reshape(4, -1).shape[1])
            for part in (q, keys[sequences, positions], values[sequences, positions])
        ]
        output = ops.attention(*inputs, cache.layers[0], scale=0.25)
        buffer = device.upload(np.full(q.shape, np.nan, np.float32))
        target = target_of(device, StepKind(4), fuse=fuse)
        lowering = lower(target, output, device.upload(packed), buffer)
        plan = lowering.place(Arena(device))
        run(device, [*plan.body, *plan.head], 4, int(positions.max()) + 1)
        y = from_rows(device.read(buffer), 4, q.shape[1])
        layer = cache.layers[0]
        written = device.read(layer.keys).reshape(layer.slots, n_kv_heads, d)
    for row, (s, position) in enumerate(zip(sequences, positions, strict=True)):
        page = order[s * PAGES + position // PAGE]
        key = written[page * PAGE + position % PAGE]
        if not alive[row]:
            assert np.isnan(key).all()
            continue
        assert (key == keys[s, position]).all()
        past = slice(0, position + 1)
        k, v = (part[s, past].reshape(position + 1, -1) for part in (keys, values))
        expected = attention_check.attention(q[row : row + 1], k, v, n_kv_heads * group, 0.25)
        assert nmse(y[row : row + 1], expected) <= LIMIT
    assert np.count_nonzero(~np.isnan(written[:, 0, 0])) == sum(lengths) + 3


def test_latents_of_several_sequences_in_scattered_pages(
    device: Device, rng: np.random.Generator
) -> None:
    """Each row is cached in its own sequence; a stopped one writes nothing."""
    sequences, positions, alive = np.array([2, 0, 1]), np.array([39, 4, 299]), np.array([1, 1, 0])
    x, weight, order = normal(rng, 3, 48), normal(rng, 32), rng.permutation(3 * PAGES)
    frequencies = 10.0 ** -np.arange(0, 2, 2 / 8)
    with device.scope():
        shape = KVShape(1, 48, latent=True)
        layer = KVCache(device, [shape], 512, sequences=3, dtype="f32", paged=True).layers[0]
        device.write(layer.pages, order.astype(np.uint32))
        device.write(layer.keys, np.full(layer.slots * 48, np.nan, np.float32))
        packed = pack_step([0] * 3, 0)
        rows = packed[HEADER.itemsize :].view(ROW)
        rows["sequence"], rows["position"], rows["alive"] = sequences, positions, alive
        q, both = (ops.input(device.upload(to_rows(part, 3)), 48) for part in (x, x))
        k, v = ops.split(both, 16, 32)
        rope = Rope(device.upload(functions.rope_table(frequencies, 300)), 16)
        k, v = ops.rope(k, rope, 16), ops.rmsnorm(v, to_gpu(device, weight), EPS)
        output = ops.attention(q, k, v, layer, scale=1.0)
        target = target_of(device, StepKind(3))
        lowering = lower(target, output, device.upload(packed), device.buffer(4 * 3 * 48))
        plan = lowering.place(Arena(device))
        run(device, [*plan.body, *plan.head], 3, 300)
        written = device.read(layer.keys).reshape(layer.slots, 48)
    assert "latent_write" in {kernel.spec.name for kernel in lowering.kernels}
    expected = np.full(written.shape, np.nan)
    turned = rope_check.rope(x[:, :16], positions, frequencies, 16)
    normed = norm_check.rmsnorm(x[:, 16:], weight, EPS)
    for row in np.flatnonzero(alive):
        page = order[sequences[row] * PAGES + positions[row] // PAGE]
        at = page * PAGE + positions[row] % PAGE
        expected[at] = np.concatenate([turned[row], normed[row]])
    np.testing.assert_allclose(written, expected, rtol=1e-5, atol=1e-6)


def test_prefill_in_scattered_pages(device: Device, rng: np.random.Generator) -> None:
    q, k, v = normal(rng, 130, 2 * 24), normal(rng, 700, 24), normal(rng, 700, 24)
    with device.scope():
        known = [part.reshape(1, 700, 1, 24) for part in (k, v)]
        cache = scattered(device, [570], *known, order=rng.permutation(-(-700 // PAGE)))
        forward = Forward(device, 130)
        inputs = [forward.input(part) for part in (q, k[570:], v[570:])]
        output = ops.attention(*inputs, cache.layers[0], scale=0.2, window=400)
        y = forward.run(output, position=570)
    assert nmse(y, attention_check.attention(q, k, v, 2, 0.2, 400)) <= LIMIT


# Variants that the rules can choose, and others


@pytest.mark.full
@thirds
def test_every_variant_of_attention(device: Device, rng: np.random.Generator, part: int) -> None:
    shapes = product((1, 2, 3, 4, 7, 8), (1, 2, 8), (64, 80, 128, 256))
    found: dict[tuple[AttentionVariant, int], list[tuple[AttentionVariant, int]]] = {}
    for tuning, (group, n_kv_heads, d) in product([*rules(device)], shapes):
        variant = attention_variant(tuning, group, n_kv_heads, d)
        if variant is not None:
            found.setdefault((replace(variant, splits=0), d), []).append((variant, group))
    for index, ((_, d), same) in enumerate([*found.items()][part::3]):
        variant, group = max(same, key=lambda item: item[0].splits)
        tuning = Forced(device, variant)
        # Alone a row turns in the kernel, two are turned before it.
        error = rope_attention_error(
            device, rng, (1, group), d, 530, 0, "f16", rows=1 + index % 2, tuning=tuning
        )
        assert error <= LIMIT, (variant, group, d)


@pytest.mark.full
def test_every_variant_of_attention_that_joins(device: Device, rng: np.random.Generator) -> None:
    found: dict[tuple[AttentionVariant, int], AttentionVariant] = {}
    for tuning, group, d in product(rules(device), (1, 8), (16, 64, 80, 128, 256)):
        variant = attention_variant(tuning, group, 2, d)
        joined = variant and attention_joined_variant(tuning, variant, 1, 2 * group, group)
        if variant is not None and joined is not None:
            found[joined, d] = variant
    assert found
    for (joined, d), variant in found.items():
        tuning, past = Forced(device, variant, joined), joined.max_split - 1
        error = rope_attention_error(device, rng, (1, 2), d, past, 0, "f16", tuning=tuning)
        assert error <= LIMIT, (joined, d)


# For head_dim 64: more scores than lanes of a cluster and fewer, few splits and more than are
# combined at once.
ATTENTION_VARIANTS = [
    AttentionVariant(128, 1, 8, 1, 1, 64, 1, 16),
    AttentionVariant(128, 2, 8, 1, 1, 8, 32, 64),
    AttentionVariant(64, 3, 4, 2, 2, 8, 8, 256),
    AttentionVariant(64, 5, 4, 2, 1, 3, 100, 1000),
    AttentionVariant(64, 6, 8, 1, 8, 17, 1, 1000),
    AttentionVariant(128, 7, 8, 1, 4, 33, 8, 1000),
    AttentionVariant(8, 1, 1, 8, 1, 5, 1, 90),
    AttentionVariant(256, 2, 8, 1, 8, 2, 1, 1000),
]


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS, ids=str)
def test_any_variant_of_attention(
    device: Device, rng: np.random.Generator, variant: AttentionVariant, rows: int
) -> None:
    tuning = Forced(device, variant)
    window = 77 * (rows - 1)
    for past in (0, 3, 530):
        shape = (2, variant.heads), 64, past, window, "f16"
        error = rope_attention_error(device, rng, *shape, norms=True, rows=rows, tuning=tuning)
        assert error <= LIMIT, past


# (splits, least of a split, positions before the first row): the last row has fewer splits than one
# before it, which needs the most that the shorter context has, and more than the whole cache.
UNLIKE_SPLITS = [(5, 1, 3), (9, 1, 56), (32, 16, 508), (32, 16, 540), (64, 8, 508)]


@pytest.mark.parametrize(("splits", "least", "past"), UNLIKE_SPLITS)
@pytest.mark.parametrize("window", [0, 513])
def test_rows_with_more_splits_than_the_last(
    device: Device, rng: np.random.Generator, splits: int, least: int, past: int, window: int
) -> None:
    tuning = Forced(device, AttentionVariant(32, 1, 8, 1, 1, splits, least, 512))
    shape = (1, 1), 64, past, window, "f32"
    assert rope_attention_error(device, rng, *shape, rows=8, tuning=tuning) <= LIMIT


def test_a_variant_of_attention_that_needs_too_much_memory(least_device: Device) -> None:
    wide = AttentionVariant(256, 4, 1, 64, 1, 8, 32, 256)
    assert wide.merged(16384, lanes=8) == 0
    assert replace(wide, workgroup=32).merged(16384, lanes=8) == 1
    assert replace(wide, workgroup=32).merged(1 << 20, lanes=8) == 4
    tuning = Forced(least_device, wide)
    tuning.subgroup_size = 8
    x, k = np.zeros((1, 4 * 512)), np.zeros((1, 512))
    with pytest.raises(ShaderError, match="Take fewer invocations"):
        functions.attention(least_device, x, k, k, n_kv_heads=1, scale=1.0, tuning=tuning)
