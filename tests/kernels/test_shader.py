"""The preprocessor: what it makes of a kernel file, and what it says about a wrong one."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import others_full
from test_lower import Everywhere

from infer.engine.prediction import with_shared
from infer.engine.speculation import MAX_DRAFT
from infer.engine.steps import Loaded
from infer.kernels.checks import experts_check, functions
from infer.kernels.checks.functions import validate
from infer.kernels.checks.linear_check import ByMatrix, ByRows
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device, DryDevice, Limits
from infer.kernels.gpu.shader import (
    WGSL_FOLDER,
    Binding,
    Declared,
    KernelSpec,
    Param,
    Shader,
    render,
    render_text,
)
from infer.kernels.gpu.tensor import OWN, allocate
from infer.kernels.lowering.graph import Value
from infer.kernels.lowering.target import StepKind
from infer.kernels.ops.rope import Rope
from infer.kernels.state.hidden_states import HiddenStates
from infer.kernels.state.kv_cache import KV_DTYPES, KVCache
from infer.kernels.state.layer_state import Cache, LayerState
from infer.kernels.state.sampler import Sampler, SamplerChain
from infer.models import build_model
from infer.models.blocks.mtp import Predictor
from infer.models.loading.plan import plan_random
from infer.models.loading.shapes import SHAPES, shape_config


def rendered(text: str, **params: Param) -> str:
    return render_text(textwrap.dedent(text), **params).code


def body(text: str, **params: Param) -> list[str]:
    """The lines that are not empty, without the parameters' own."""
    lines = [line.strip() for line in rendered(text, **params).splitlines()]
    return [line for line in lines if line and not line.startswith("const ")]


def error_of(text: str, **params: Param) -> str:
    with pytest.raises(ShaderError) as caught:
        rendered(text, **params)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value", "constant"),
    [
        ("u32", 7, "const A: u32 = 7u;"),
        ("u32", 2**32 - 1, "const A: u32 = 4294967295u;"),
        ("i32", -7, "const A: i32 = -7i;"),
        ("f32", 1e-06, "const A: f32 = 1e-06f;"),
        ("f32", 2, "const A: f32 = 2.0f;"),
        ("bool", True, "const A: bool = true;"),
        ("bool", False, "const A: bool = false;"),
    ],
)
def test_a_parameter_becomes_a_constant(kind: str, value: Param, constant: str) -> None:
    code = rendered(f"// @param A {kind}   what it is\nlet x = A;", A=value)
    assert code.splitlines()[0] == constant


def test_a_word_is_only_for_conditions() -> None:
    text = "// @param T f16|f32\n#if T == f16\nhalf\n#else\nfull\n#endif"
    assert body(text, T="f16") == ["half"]
    assert body(text, T="f32") == ["full"]
    assert "const" not in rendered(text, T="f16")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("u32", -1),
        ("u32", 2**32),
        ("u32", 1.0),
        ("u32", True),
        ("u32", "1"),
        ("i32", 2**31),
        ("f32", "1"),
        ("f32", False),
        ("bool", 1),
        ("f16|f32", "f64"),
        ("f16|f32", 16),
    ],
)
def test_a_value_must_be_of_the_declared_type(kind: str, value: Param) -> None:
    message = error_of(f"// @param A {kind}\n#if A\n#endif", A=value)
    assert message == f"shader: parameter A is {kind}, not {value!r}"


def test_unknown_missing_and_unused_parameters_are_errors() -> None:
    assert error_of("", B=1, A=1) == "shader declares no parameter A, B"
    assert error_of("// @param A u32\nA") == "shader needs the parameter A"
    unused = "// @param A u32\n// A in a comment is no use, nor in BA or A_\nBA A_"
    assert error_of(unused, A=1) == "shader: parameter A is declared but never used"


def test_declarations_must_agree_and_be_of_known_types() -> None:
    twice = "// @param A u32\n// @param A f32\nA"
    assert error_of(twice, A=1) == "shader:2: parameter A was declared as u32"
    assert body("// @param A u32\n// @param A u32\nA", A=1) == ["A"]
    assert "shader:1" in error_of("// @param A f64\nA", A=1)


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(1, 5, "one"), (2, 5, "two five"), (2, 6, "two"), (3, 5, "other")]
)
def test_the_first_branch_that_holds_is_taken(a: int, b: int, expected: str) -> None:
    text = """
    // @param A u32
    // @param B u32
    #if A == 1
    one
    #elif A == 2
      #if B == 5
    two five
      #else
    two
      #endif
    #else
    other
    #endif
    """
    assert body(text, A=a, B=b) == [expected]


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("7 / 2 == 3", True),
        ("(A + 7) / 8 % 3 != 1", False),
        ("A + 2 * 3 - 1 == 10", True),
        ("A > 4 and not B", True),
        ("A < 4 or B", False),
        ("A >= 5 and A <= 5", True),
        ("W == red", True),
        ("W != red", False),
        ("A + B == 5", True),
        ("A == 5   // not 6", True),
        ("log2(A) == 2 and log2(A + 3) == 3", True),
    ],
)
def test_expressions_are_pythons(expression: str, holds: bool) -> None:
    declared = "// @param A u32\n// @param B bool\n// @param W red|blue\n#if A or B or W\n#endif\n"
    text = f"{declared}#if {expression}\nyes\n#else\nno\n#endif"
    assert body(text, A=5, B=False, W="red") == ["yes" if holds else "no"]


@pytest.mark.parametrize(
    "expression",
    [
        "X",
        "A.real",
        "A()",
        "log2(A, 2)",
        "[A]",
        "A if A else 0",
        "0 < A < 9",
        "~A",
        "A **",
        "A @ 1",
    ],
)
def test_nothing_else_is_evaluated(expression: str) -> None:
    message = error_of(f"// @param A u32\nA\n#if {expression}\n#endif", A=5)
    assert message.startswith("shader:3: cannot")


def test_for_repeats_lines() -> None:
    text = """
    // @param N u32
    #for i in 0..N
    a$i = b[$iu] + $(2 * $i + N);
    #for j in 1..N
    c$i_$j
    #endfor
    #endfor
    #for i in N..N
    never
    #endfor
    """
    assert body(text, N=2) == ["a0 = b[0u] + 2;", "c0_1", "a1 = b[1u] + 4;", "c1_1"]


def test_conditions_may_depend_on_the_repetition() -> None:
    text = "#for i in 0..4\n#if $i % 2 == 0\neven$i\n#endif\n#endfor"
    assert body(text) == ["even0", "even2"]


def test_extensions_are_moved_to_the_top_once() -> None:
    text = "// @param A bool\nx\n#if A\n#enable f16\n#endif\n#enable f16\n#enable other"
    assert rendered(text, A=True).splitlines()[:2] == ["enable f16;", "enable other;"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\n#if 1\ny", "shader:2: #if without #endif"),
        ("x\n#for i in 0..2\ny", "shader:2: #for without #endfor"),
        ("x\n#endif", "shader:2: unexpected #endif"),
        ("x\n#else", "shader:2: unexpected #else"),
        ("x\n#unknown", "shader:2: unexpected #unknown"),
        ("#if 0\n#else\n#elif 1\n#endif", "shader:3: a branch after #else"),
        ("#if 0\n#else\n#else\n#endif", "shader:3: a branch after #else"),
        ("x\n\n#for i from 0..2\n#endfor", "shader:3: write #for LETTER in FIRST..END"),
        ("x$i", "shader:1: $i is not the name of an enclosing #for"),
        ("#for i in 0..2\n#endfor\nx$i", "shader:3: $i is not the name of an enclosing #for"),
        ("#include grid.wgsl", 'shader:1: write #include "name.wgsl"'),
    ],
)
def test_wrong_directives_are_placed(text: str, message: str) -> None:
    assert error_of(text) == message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Kernel files that include one another."""
    files = {
        "main.wgsl": """
            // the kernel
            #include "left.wgsl"
            #include "right.wgsl"
            fn main() {
              $(A)
            }
        """,
        "left.wgsl": '#include "common.wgsl"\nleft A',
        "right.wgsl": '#include "common.wgsl"\n#include "main.wgsl"\nright\nA $',
        "common.wgsl": "// @param A u32\n#if A > 3\nbig\n#endif\ncommon",
        "lost.wgsl": '\n#include "nowhere.wgsl"',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def test_an_include_comes_once_with_its_parameters(folder: Path) -> None:
    shader = render(KernelSpec.of("main", A=5), folder)
    lines = [line.strip() for line in shader.code.splitlines() if line.strip()]
    assert lines == [
        "const A: u32 = 5u;",
        "// the kernel",
        "big",
        "common",
        "left A",
        "right",
        "A $",
        "fn main() {",
        "5",
        "}",
    ]
    other = render(KernelSpec.of("main", A=2), folder).code
    assert "big" not in other
    assert "  2\n" in other


def test_every_line_knows_its_source(folder: Path) -> None:
    shader = render(KernelSpec.of("main", A=5), folder)
    places = {line.strip(): shader.place(i) for i, line in enumerate(shader.code.splitlines(), 1)}
    assert places["big"] == "common.wgsl:3"
    assert places["left A"] == "left.wgsl:2"
    assert places["right"] == "right.wgsl:3"
    assert places["5"] == "main.wgsl:6"
    assert places["const A: u32 = 5u;"] == "main (parameters):1"


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(ShaderError, match=r"no kernel file nowhere\.wgsl"):
        render(KernelSpec.of("lost"), folder)
    with pytest.raises(ShaderError, match=r"no kernel file missing\.wgsl"):
        render(KernelSpec.of("missing"))


def test_bindings_are_read() -> None:
    shader = render_text(
        """
        @group(0) @binding(1) var<storage, read_write> y: array<f32>;
        @group(0) @binding(0) var<storage, read> x: array<f32>;
        @group(0) @binding(2) var<uniform> z: vec4<f32>;
        """
    )
    assert shader.bindings == (
        Binding(0, "x", "read"),
        Binding(1, "y", "read_write"),
        Binding(2, "z", "uniform"),
    )


def test_bindings_have_no_gap() -> None:
    text = "@group(0) @binding(1) var<storage, read> x: array<f32>;"
    assert "without a gap" in error_of(text)


def test_a_spec_is_a_key_and_a_label() -> None:
    spec = KernelSpec.of("activation", WIDTH=4, GATED=True)
    assert spec == KernelSpec.of("activation", GATED=True, WIDTH=4)
    assert hash(spec) == hash(KernelSpec.of("activation", GATED=True, WIDTH=4))
    assert spec != KernelSpec.of("activation", GATED=False, WIDTH=4)
    assert spec.label == "activation GATED=True WIDTH=4"


# With a compiler


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("fn main() {\n  let x = y;\n}", "shader:2:11: "),
        (
            "// @param A u32\nfn f() -> u32 {\n  return A;\n}\nfn main() {\n  let = 1;\n}",
            "shader:6:7: ",
        ),
        ("fn main() {\n  let x = 1u;\n  let z = x + 1f;\n}", "shader:3:11: "),
        ("fn main() {\n#for i in 0..3\n  let a$i = 1;\n#endfor\n  b();\n}", "shader:5:3: "),
        ("\nfn main() -> u32 {}", "shader:2:"),  # where it begins, or its end
    ],
)
def test_compiler_messages_are_placed(device: Device, text: str, place: str) -> None:
    params: dict[str, Param] = {"A": 1} if "@param" in text else {}
    (message,) = validate(text, device, **params)
    assert message.startswith(place)


def test_messages_are_placed_in_the_included_file(device: Device, folder: Path) -> None:
    (folder / "top.wgsl").write_text('// first\n#include "wrong.wgsl"\nfn main() {}\n')
    (folder / "wrong.wgsl").write_text("#if 1\n\nfn g() { let a = unknown; }\n#endif\n")
    (message,) = device.validate(render(KernelSpec.of("top"), folder))
    assert message.startswith("wrong.wgsl:3:18: ")
    assert "unknown" in message


def test_validate_says_what_is_wrong_before_the_compiler(device: Device) -> None:
    assert validate("fn f() {}", device) == []
    assert validate("fn f() {}", device, name="mine", A=1) == ["mine declares no parameter A"]
    assert validate("#if 1", device, name="mine") == ["mine:1: #if without #endif"]


def test_a_kernel_that_does_not_compile_is_an_error(device: Device) -> None:
    spec = KernelSpec.of("broken")
    shader = render_text("fn main() { nonsense }", "broken")
    with pytest.raises(ShaderError, match=r"broken does not compile:\nbroken:1:\d+: "):
        device.compile(spec, shader)
    no_entry: Shader = render_text("fn other() {}", "broken")
    with pytest.raises(ShaderError, match="main"):
        device.compile(spec, no_entry)


# Every kernel file

SAMPLERS = [
    SamplerChain(noise, penalties, bias, top_k, top_p, min_p)
    for noise, penalties, bias, top_k, top_p, min_p in product((False, True), repeat=6)
    if noise or not (top_k or top_p or min_p)
]
SAMPLERS.append(SamplerChain(logprobs=True))
SAMPLERS += [replace(chain, mask=True, ends=True) for chain in (SAMPLERS[0], SAMPLERS[-2])]


STEPS = [*product(KV_DTYPES, (True, False), ((1, 1), (8, 1), (512, 1), (128, None), (16, None)))]


def model_specs(
    shape: str,
    limits: Limits,
    lanes: int,
    dtype: str,
    steps: Iterable[Any] = STEPS,
    changed: bool = False,
    software: bool = False,
    matrices: bool = False,
) -> Iterator[KernelSpec]:
    """The kernels of the steps (dtype of the cache; fused or not; rows, and those with logits: all
    of up to 64, in a batch, and with drafts) of a real model, of which nothing is allocated, on an
    adapter with so many lanes in a subgroup, or 0 for none. changed: by LoRA adapters, each row by
    its own. software: the adapter is a CPU. matrices: subgroups multiply them, emulated."""
    raw = shape_config(shape)
    kinds = build_model(raw).config.states
    few = kinds.index(None) + 1  # attention, and what comes before
    raw.values["num_hidden_layers"] = few
    for key in raw.values.keys() & {"layer_types", "hybrid_override_pattern"}:
        raw.values[key] = raw.values[key][:few]
    if "num_kv_shared_layers" in raw.values:
        types = ["sliding_attention", "full_attention"] * 2
        raw.values |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": types}
    model = build_model(raw)
    c = model.config
    dry = DryDevice(limits)
    dry.subgroups, dry.subgroup_size, dry.software = lanes > 0, lanes, software
    dry.largest_subgroup = lanes if software else dry.largest_subgroup
    plan = plan_random(model.weights(), "f32").joined()
    weights = {w.name: allocate(dry, w.shape, dtype, unit=w.spec.unit) for w in plan.weights}
    predictor = model.predictor
    if isinstance(predictor, Predictor):
        predictor = predictor.of(HiddenStates.new(dry, c.hidden_size, 8))
        plan = plan_random(predictor.weights(), "f32").joined()
        own = {w.name: allocate(dry, w.shape, dtype, unit=w.spec.unit) for w in plan.weights}
        behind = with_shared(Loaded(predictor, own), Loaded(model, weights)).weights
    for kv_dtype, fuse, (rows, logits) in steps:
        caches: list[Cache] = []
        ropes = []
        for layer, (state, source) in enumerate(zip(c.states, c.kv_sources, strict=True)):
            if state is not None:
                caches.append(LayerState.new(dry, state, layer, drafts=MAX_DRAFT))
            elif source < layer:
                caches.append(caches[source])
            else:
                caches += KVCache(dry, [c.kv_shape(layer)], 4096, dtype=kv_dtype).layers
            rope = c.local_rope if c.local_rope and c.windows[layer] else c.rope
            ropes.append(Rope(dry.buffer(1), rope.rotary_dim, interleaved=kv_dtype == "f32"))
        output = model.forward(weights, ropes, caches)
        also: tuple[Value, ...] = ()
        if predictor is not None:
            cache = KVCache(dry, predictor.config.kv_shapes, 4096, dtype=kv_dtype).layers[0]
            also = tuple(predictor.beside(output, weights, behind, ropes[-1], cache))
        batch = logits is None and rows <= 64
        for drafts in (0, MAX_DRAFT) if batch and any(c.states) else (0,):
            target = target_of(
                dry,
                StepKind(rows, logits, batch=batch, drafts=drafts),
                fuse=fuse,
                tuning=ByMatrix(dry) if matrices else ByRows(dry) if batch else None,
            )
            changes = Everywhere(dry, by_row=True) if changed else {}
            buffers = dry.buffer(1), dry.buffer(1)
            lowering = lower(target, output, *buffers, changes=changes, also=also)
            yield from (kernel.spec for kernel in lowering.kernels)


def sampler_specs(device: Device) -> Iterator[KernelSpec]:
    with device.scope():
        logits, step = device.buffer(8 * 4 * 5000), device.buffer(4096)
        sampler = Sampler(device, 5000, logits, step, max_rows=8)
        yield sampler.step_rows.pipeline.spec
        for chain, gather in product(SAMPLERS, (0, 1)):
            for drafts in {False, not gather}:
                for unknown in {False, drafts}:
                    plan = sampler.dispatches(chain, gather, drafts, unknown)
                    yield from (item.pipeline.spec for item in plan)
        drafting = Sampler(device, 5000, logits, step, max_rows=8, verified=(sampler, step))
        for chain in SAMPLERS:
            yield from (item.pipeline.spec for item in drafting.dispatches(chain, 0)[:-1])
        yield KernelSpec.of("sample_drafts")  # reads and writes two step buffers


@pytest.mark.full
@pytest.mark.parametrize("all_sizes", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_kernel_compiles_for_real_models(device: Device, all_sizes: bool) -> None:
    """One kernel stands for all that differ in nothing but numbers; and every third step of a model
    is compiled, the next ones with the next model."""
    few = Limits()
    many = Limits(1 << 31, 1 << 32, 49152, 1024, storage_buffers=9)
    specs = {KernelSpec.of("fill_random", DTYPE=dtype) for dtype in ("f32", "f16", "bf16")}
    specs |= {KernelSpec.of("copy", VECTORS=1024), KernelSpec.of("subgroup_size")}
    one = {"WIDTH": 9, "X_STRIDE": 16, "X_OFFSET": 0, "Y_STRIDE": 16}
    specs |= {KernelSpec.of("clip", LIMIT=8.0, **one), KernelSpec.of("xielu", **one)}
    specs |= {KernelSpec.of("position_scale", BETA=0.1, INTERVAL=16384, **one)}
    specs |= {KernelSpec.of("scale", **one)}
    specs |= {
        KernelSpec.of("quantize_weight", WEIGHT=stored, FORMAT=dtype)
        for stored, dtype in product(("f32", "f16", "bf16"), ("q8", "q4"))
    }
    specs |= set(sampler_specs(device))
    settings = ((few, 0), (few, 8), (many, 32), (many, 64))
    pairs = [*product(SHAPES, ("bf16", "f16", "f32", "q8", "q4")), *product(SHAPES, ("bf16", "q4"))]
    for i, ((shape, dtype), (limits, lanes)) in enumerate(zip(pairs, cycle(settings))):
        steps = STEPS if all_sizes else STEPS[i % 3 :: 3]
        specs |= set(model_specs(shape, limits, lanes, dtype, steps))
    for limits, lanes in settings:
        specs |= set(model_specs("llama-3.2-1b", limits, lanes, "bf16", STEPS[::4], changed=True))
    for dtype in ("bf16", "q4"):
        specs |= set(model_specs("llama-3.2-1b", few, 8, dtype, STEPS[::4], software=True))
    chunk = [("f16", True, (512, 1))]
    for dtype, name in product(("bf16", "q4"), ("llama-3.2-1b", "qwen3-30b-a3b")):
        specs |= set(model_specs(name, many, 32, dtype, chunk, matrices=True))
    for dtype in ("f32", "f16", "bf16", "q8", "q4"):
        specs.add(KernelSpec.of("row_scales", K=4096, WEIGHT=dtype, **OWN.params))
    texts = {file.stem: file.read_text() for file in WGSL_FOLDER.rglob("*.wgsl")}
    included = re.findall(r"^#include \"(\w+).wgsl\"", "\n".join(texts.values()), re.M)
    files = texts.keys() - set(included)
    assert {spec.name for spec in specs} == files
    # In an order in which those that share lines are neighbours.
    shaders = {shader.code: shader for shader in map(render, sorted(specs, key=repr))}
    if not all_sizes:
        sizes = re.compile(r"^const \w+: (u32 = \d+u|f32 = .+f);$", re.M)
        shaders = {sizes.sub("", code): shader for code, shader in shaders.items()}
    assert [message for shader in shaders.values() for message in device.validate(shader)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
def test_drivers_compile_the_kernels_of_real_models(least_device: Device, shape: str) -> None:
    for dtype in ("bf16", "f16", "f32"):
        least_device.pipelines(model_specs(shape, Limits(), 0, dtype))


def invocations(code: str) -> int:
    """Returns how many invocations a workgroup has, a product of constants."""
    (shape,) = re.findall(r"@workgroup_size\(([^)]+)\)", code)
    return math.prod(Declared.of(code).number(side) for side in shape.split(","))


def test_workgroup_memory_is_counted() -> None:
    code = """alias Two = vec2<f32>;
const A: u32 = 6u;
const B = A / 4u;  // 1
const C: f32 = 0.5f;
var<workgroup> x: array<vec4<f32>, 2u * A>;
var<workgroup> y: array<array<f32, max(A, 3u)>, B + 1u>;
var<workgroup> z: array<Both, 3>;
struct Both {
  a: atomic<u32>,  // and 4 bytes for which nothing is
  b: Two,
  c: vec3<f32>,
  d: u32,
  e: f32  // and 12
}
@compute @workgroup_size(A, 4)
fn main() {}
"""
    shader = render_text(code)
    assert shader.workgroup_storage == 12 * 16 + 2 * 6 * 4 + 3 * 48
    assert invocations(shader.code) == 24


def test_too_much_workgroup_memory_is_refused(least_device: Device) -> None:
    """512 experts are as many as models have."""
    rng = np.random.default_rng(0)
    for experts, fits in ((512, True), (1024, False)):
        logits, correction = rng.standard_normal((2, 3, experts), np.float32)
        options: dict[str, Any] = {"slots": 22, "normalize": True, "correction": correction[0]}
        if fits:
            ids, _ = functions.route(least_device, logits, **options)
            assert np.array_equal(ids, experts_check.route(logits, **options)[0])
        else:
            with pytest.raises(
                ShaderError, match=r"route .* needs 19,040 bytes of workgroup memory"
            ):
                functions.route(least_device, logits, **options)


@pytest.mark.parametrize("turns", [1, pytest.param(3, marks=pytest.mark.full)])
@others_full("dtype", ["bf16", "q8", "iq4nl", "nf4"], default=["nf4"])
def test_kernels_keep_to_the_limits_of_workgroups(dtype: str, turns: int) -> None:
    """wgpu refuses too many invocations, but not too much memory: a driver may crash instead. Each
    model takes a third of the steps in each turn, with a setting of its own."""
    both = Limits(workgroup_storage=32768, max_invocations=1024)  # as of most GPUs
    choice = Limits(), both, Limits(max_invocations=1024)
    settings = [*product(choice, (0, 8, 32))]
    least: dict[KernelSpec, tuple[int, int]] = {}  # limits under which a kernel is chosen
    pairs = product(range(turns), enumerate(SHAPES))
    for (turn, (i, shape)), (limits, lanes) in zip(pairs, cycle(settings)):
        steps = STEPS[(i // 3 + turn) % 3 :: 3]
        for spec in set(model_specs(shape, limits, lanes, dtype, steps)):
            own = limits.workgroup_storage, limits.max_invocations
            least[spec] = tuple(map(min, own, least.get(spec, own)))
    for spec, (storage, most) in least.items():
        shader = render(spec)
        assert shader.workgroup_storage <= storage, spec.label
        assert invocations(shader.code) <= most, spec.label


def component_writes(code: str) -> list[str]:
    """Returns the assignments to a component of a vector in memory that invocations share."""
    code = re.sub(r"//.*", "", code)
    vectors = "|".join(["vec", *re.findall(r"^alias (\w+) = vec", code, re.M)])
    index = r"\[(?:[^][]|\[[^][]*\])*\]"
    found = []
    shared = r"\bvar<(?:workgroup|storage, read_write)> (\w+): ([^;]+);"
    for name, kind in dict.fromkeys(re.findall(shared, code)):
        if re.search(rf"\b({vectors})", kind):
            whole = rf"\b{name}(?:{index}){{{kind.count('array<')}}}"
            assigned = r"\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)"
            found += re.findall(rf"({whole}(?:{index}|\.[xyzw]+)){assigned}", code)
    return found


def test_component_writes_are_found() -> None:
    code = """alias Two = vec$(TILE)<f32>;
var<workgroup> x: array<vec4<f32>, 8>;
var<workgroup> y: array<array<Two, 8>, 2>;
var<workgroup> z: array<f32, 8>;
var<workgroup> w: vec2<u32>;
@group(0) @binding(0) var<storage, read_write> v: array<vec2<u32>>;  // or
@group(0) @binding(0) var<storage, read_write> v: array<u32>;
x[i / 4u][i % 4u] = 1.0;
x[n[i]].y += 1.0;
x[i] = x[i + 1u].xyzw;
y[i][1] = y[i][0];
y[i][1][0] *= 2.0;
b = y[i][1][0] == y[0][1][0];
z[i] = x[i][0];
w.x = 1u;  // w.y = 1u
v[i] = v[i + 1u];
v[i / 2u][i % 2u] = 1u;
"""
    found = ["x[i / 4u][i % 4u]", "x[n[i]].y", "y[i][1][0]", "w.x", "v[i / 2u][i % 2u]"]
    assert component_writes(code) == found


def test_nobody_writes_a_component_of_a_shared_vector() -> None:
    """That may touch the whole vector (WGSL's memory model), of which neighbours write the rest."""
    texts = {file.name: file.read_text() for file in WGSL_FOLDER.rglob("*.wgsl")}
    for kernel in texts:
        files = [kernel]
        for name in files:
            included = re.findall(r'^#include "(.+)"', texts[name], re.M)
            files += [other for other in included if other not in files]
        assert component_writes("".join(texts[name] for name in files)) == [], kernel


TOKEN = re.compile(r"[\w.]+|->|\+\+|--|<<=|>>=|&&|\|\||<<|>>|[-+*/%&|^=!<>]=|\S")
RELATION = re.compile(r" (?:==|!=|<=|>=|<|>) ")
BINARY = {*"+-*/%&|^<>", "<<", ">>", "&&", "||", "==", "!=", "<=", ">="}


def is_grammatical(operators: Sequence[str]) -> bool:
    """Whether one expression may have these binary operators, in this order, without parentheses
    (WGSL 8.18): of & | ^ only one; && or ||, between comparisons of at most one relation; a shift
    only alone on its side of that."""
    if {*operators} & {*"&|^"}:
        return len({*operators}) == 1
    if {"&&", "||"} <= {*operators}:
        return False
    for comparison in re.split(r"&&|\|\|", f" {'  '.join(operators)} "):
        sides = [side.split() for side in RELATION.split(comparison)]
        if len(sides) > 2 or any({*side} & {"<<", ">>"} and len(side) > 1 for side in sides):
            return False
    return True


def ungrammatical(code: str) -> list[str]:
    """The expressions of a kernel file, before it is preprocessed, that lack parentheses."""
    code = re.sub(r"//.*|^ *#.*", "", code, flags=re.M)
    code = re.sub(r"\$(?:\([^()]*\)|[a-z])", "0", code)
    templates = 1
    while templates:
        kind = r"\b(array|atomic|bitcast|mat\w+|ptr|subgroup\w+|var|vec\d)<([^<>;]*)>"
        code, templates = re.subn(kind, r"\1[\2]", code)
    found, outer = list[str](), list[tuple[int, list[str]]]()
    begin, operators, after_operand = 0, list[str](), False
    for match in TOKEN.finditer(code):
        token = match[0]
        if token in BINARY and after_operand:
            operators.append(token)
            after_operand = False
        elif token in BINARY or token in "!~@":
            after_operand = False
        elif re.match(r"\w", token):
            after_operand = token != "return"
        elif token in "([":
            outer.append((begin, operators))
            begin, operators, after_operand = match.end(), [], False
        else:  # an expression ends
            if not is_grammatical(operators):
                found.append(code[begin : match.start()].strip())
            begin, operators = outer.pop() if token in ")]" else (match.end(), [])
            after_operand = token in ")]"
    return found


def test_missing_parentheses_are_found() -> None:
    """The examples of WGSL's specification, and what naga takes all the same."""
    right = """
let a = x & (y ^ (z | w));
let b = (x + y) << (z >= w);
let c = x < (y > z);
let d = x && (y || z);
let e = x + y < z * w && !x == y && x << y == z >> w && vec2<u32>(x & ~y, -z)[1] > x;
for (var i = n(x & y & z, x ^ 1u); (i & 1u) != $(8 - 4)u; i += x | y) { return -x; }
"""
    wrong = ["x & y ^ z | w", "x + y << z >= w", "x < y > z", "x && y || z"]
    wrong += [
        "part & CLUSTER / 2u",
        "x & y == z",
        "x << y << z",
        "x | f(a, b + 1u) + y",
        "-x ^ y < z",
    ]
    assert ungrammatical(right) == []
    assert ungrammatical("".join(f"let a = (b + c[{text}]);\n" for text in wrong)) == wrong


def test_expressions_have_the_parentheses_that_wgsl_wants() -> None:
    """The compiler of wgpu takes them without, those of browsers and of Dawn do not."""
    found = {file.name: ungrammatical(file.read_text()) for file in WGSL_FOLDER.rglob("*.wgsl")}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_nothing_is_declared_in_vain() -> None:
    text = "".join(re.sub(r"//.*", "", file.read_text()) for file in WGSL_FOLDER.rglob("*.wgsl"))
    declared = re.findall(r"^(?:alias|const|fn|struct|var<\w+>) (\w+)", text, re.M)
    words = Counter(re.findall(r"\w+", text))
    assert [name for name in declared if words[name] == 1] == []


def test_the_sampler_keeps_to_the_least_limits(device: Device) -> None:
    for spec in set(sampler_specs(device)):
        shader = render(spec)
        assert shader.workgroup_storage <= 16384, spec.label
        assert invocations(shader.code) <= 256, spec.label
