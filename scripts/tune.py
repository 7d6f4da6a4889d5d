"""Measures every variant of a kernel in the steps of a model: the sweep behind the rules of tuning.

    python scripts/tune.py --shape llama-3.1-8b                       matmul_vec, in decode
    python scripts/tune.py --shape llama-3.1-8b --kernel matmul       in prefill
    python scripts/tune.py --shape llama-3.2-1b --kernel attention --depth 64,4096
    python scripts/tune.py --shape llama-3.1-8b --kernel matmul_rows --step-rows 8
    python scripts/tune.py --shape llama-3.1-8b --kernel matmul_matrix --webgpu dawn
    python scripts/tune.py --model demo --workgroup 64,128 --only K=64 norm

The model is lowered again for every variant. All dispatches of one shape (the same projection of
all layers) run in one compute pass between two timestamps, so that a weight comes from memory, and
not from a cache that all of them together do not fit in. Prints the time of a dispatch in
microseconds as it is measured, then a table for each shape; * is what the rules choose now.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer.bench.measure import LEAST_PASS, kernel_label, place_step
from infer.bench.options import Subject
from infer.bench.report import markdown_table
from infer.bench.run import open_engine
from infer.engine.engine import Engine
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.errors import InferError, RequestError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.plan import Dispatch
from infer.kernels.gpu.profile import profile_passes
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import BLOCK, HALF, LOOKED_UP, QUANTIZED
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import StepKind
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import attention_variant
from infer.kernels.ops.head_linear import head_linear_variant
from infer.kernels.ops.matmul_lanes import LanesVariant, matmul_lanes_variant
from infer.kernels.ops.matmul_matrix import (
    MatrixVariant,
    expert_matrix_variant,
    matmul_matrix_variant,
)
from infer.kernels.ops.matmul_rows import (
    RowsVariant,
    few_rows,
    matmul_rows_variant,
    possible_variant,
)
from infer.kernels.ops.matmul_tiles import TileVariant, matmul_int8_variant, matmul_variant
from infer.kernels.ops.matmul_vec import VecShape, matmul_vec_variant
from infer.kernels.ops.recurrent import ScanVariant, delta_rule_variant, ssm_scan_variant
from infer.kernels.state.kv_cache import KV_DTYPES
from infer.loading import DTYPES
from infer.memory import DEFAULT_CONTEXT
from infer.models.loading.shapes import PUBLISHED, SHAPES

# The rule for each kernel, and the values to try for each field of its variant.
RULES: dict[str, Callable[..., Any]] = {
    "matmul_vec": matmul_vec_variant,
    "head_linear": head_linear_variant,
    "matmul": matmul_variant,
    "matmul_int8": matmul_int8_variant,
    "matmul_rows": matmul_rows_variant,
    "matmul_lanes": matmul_lanes_variant,
    "matmul_matrix": matmul_matrix_variant,
    "ssm_scan": ssm_scan_variant,
    "delta_rule": delta_rule_variant,
    "attention": attention_variant,
}
TILES: dict[str, tuple[int, ...]] = {
    "m_tile": (4, 8),
    "n_tile": (4, 8),
    "double": (0, 1),
    "m_size": (8, 16),
    "n_size": (8, 16),
    "splits": (1, 2, 4, 8),
}
SCANS: dict[str, tuple[int, ...]] = {
    "rows": (4, 8, 16),
    "unroll": (1, 4, 8),
    "columns": (16, 32, 64),
    "split": (4, 8, 16, 32),
    "tile": (2, 4),
}
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul_vec": {
        "workgroup": (32, 64, 128, 256, 512, 1024),
        "team": (8, 16, 32, 64, 128, 256, 512),
        "outputs": (1, 2, 4, 8),
        "unroll": (1, 2, 4),
        "copies": (1, 4, 16, 32),
    },
    "head_linear": {"team": (8, 16, 32, 64), "outputs": (8, 16, 32)},
    "matmul": TILES,
    "matmul_int8": TILES,
    "matmul_rows": {
        "m_tile": (2, 4, 8, 16),
        "n_tile": (2, 4, 8),
        "k_lanes": (8, 16, 32),
        "n_teams": (1, 2, 4),
        "k_teams": (1, 2, 4),
        "splits": (1, 2),
        "staged": (0, 1),
    },
    "matmul_lanes": {"m_tile": (1, 2, 4, 8, 16), "n_tile": (2, 4, 8)},
    "matmul_matrix": {
        "rows": (16, 32, 64, 128),
        "columns": (64, 128, 256),
        "sub_rows": (16, 32, 64),
        "sub_columns": (16, 32, 64),
        "depth": (32, 64, 128),
        "splits": (1, 2, 4, 8),
        "ahead": (1, 2),
    },
    "ssm_scan": SCANS,
    "delta_rule": SCANS | {"loaders": (8, 16), "subgroups": (0, 1)},
    "attention": {
        "workgroup": (64, 128, 256),
        "heads": (1, 2, 4, 8),
        "cluster": (2, 4, 8, 16, 32),
        "per_lane": (1, 2, 4, 8),
        "batch": (1, 2, 4, 8),
        "splits": (4, 8, 16, 32, 64),
        "min_split": (32, 64, 128),
        "max_split": (256, 1024),
    },
}
# The others are decode's.
PREFILL = ("matmul", "matmul_int8", "matmul_matrix", "ssm_scan", "delta_rule")
FEW_ROWS = 8  # rows for matmul_rows without --step-rows
# Kernels that the rule of another is for as well, and those that finish the work of another.
ALIKE = {"expert_matmul_vec": "matmul_vec", "attention_decode": "attention"}
SECOND = ("attention_combine", "matmul_combine")
# Kernels that others stand for, on a CPU, or where an adapter has matrices; and the rules of those.
OTHERS = ("matmul_vec", "matmul", "matmul_int8", "matmul_rows")
STAND_INS = (matmul_lanes_variant, matmul_matrix_variant, expert_matrix_variant)


def valid(kernel: str, variant: Any, engine: Engine) -> bool:
    """Whether a kernel can be compiled in this variant on this device."""
    limits, lanes = engine.device.limits, engine.device.subgroup_size
    if kernel == "matmul_vec":
        whole = lanes > 0 and variant.team % engine.device.largest_subgroup == 0
        split = whole and variant.workgroup % variant.team == 0
        looked_up = any(weight.dtype in LOOKED_UP for weight in engine.weights.values())
        fits = 1024 * variant.copies + 2048 <= limits.workgroup_storage
        return bool(
            variant.workgroup <= limits.max_invocations
            and (variant.team == variant.workgroup or split)
            and variant.outputs * variant.unroll <= 8  # registers
            and (variant.copies == 1 or (looked_up and fits))
        )
    if kernel == "head_linear":
        return bool(variant.workgroup <= limits.max_invocations)
    if kernel == "matmul_rows":
        sums = variant.m_tile * variant.n_tile  # in registers; the rest depends on shapes
        return bool(variant.k_lanes * variant.n_lanes <= lanes and sums <= 64)
    if kernel == "attention":
        c = engine.model.config
        return bool(
            variant.workgroup <= limits.max_invocations
            and variant.cluster <= lanes
            and variant.cluster * variant.per_lane * 8 == c.head_dim
            and c.num_attention_heads // c.num_key_value_heads % variant.heads == 0
            and variant.heads * variant.per_lane <= 8  # registers
            and variant.min_split <= variant.max_split
            and variant.workgroup * variant.per_lane * 32 + 2048 <= limits.workgroup_storage
        )
    if isinstance(variant, MatrixVariant):
        m, n, k = variant.shape
        return bool(
            (variant.rows % variant.sub_rows, 128 % variant.rows) == (0, 0)  # rows are padded
            and variant.columns % 32 == 0
            and variant.columns % variant.sub_columns == 0
            and (variant.sub_rows % m, variant.sub_columns % n, variant.depth % k) == (0, 0, 0)
            and variant.sub_rows * variant.sub_columns <= 128 * variant.lanes  # registers
            and variant.runs(Tuning(engine.device))
        )
    if isinstance(variant, ScanVariant):
        key_dim = max(state.shape.key_dim for state in engine.states)
        return variant.runs(Tuning(engine.device), key_dim)
    loads = (
        variant.m_tile <= variant.n_size and variant.n_tile <= variant.m_size
        if kernel == "matmul_int8"
        else variant.m_tile % (variant.n_size // 4) == 0
    )
    return bool(
        variant.m_size * variant.n_size <= limits.max_invocations
        and variant.storage <= limits.workgroup_storage
        and 128 % variant.rows == 0  # activations are padded to 128 rows
        and loads
    )


def serves(variant: Any, *call: Any) -> bool:
    """Whether a variant can do what this call of the rule asks for."""
    if isinstance(variant, MatrixVariant):
        if len(call) == 2:  # experts: tiles have the rows that were sorted for them
            return (variant.rows, variant.splits) == (call[0], 1)
        return variant.splits == 1 or bool(call[-1])
    if isinstance(variant, TileVariant):
        return variant.splits == 1 or bool(call[3])
    shape = call[0]
    if isinstance(variant, LanesVariant):
        return variant.m_tile <= shape.rows
    if not isinstance(shape, VecShape):
        return True
    whole = not shape.quantize or variant.per_workgroup in (HALF, BLOCK)
    return whole and (variant.copies == 1 or shape.dtype in LOOKED_UP)


@dataclass(frozen=True)
class Result:
    """One variant on one shape. seconds, bytes and operations are of one dispatch. chosen: the
    rules choose it."""

    kernel: str
    kv_len: int
    variant: dict[str, int]
    seconds: float
    nbytes: float
    flops: float
    chosen: bool


@dataclass(frozen=True, eq=False)
class Group:
    """The dispatches of one shape in a plan. calls: how often the kernel runs. variant: the variant
    that it is of. dispatches: the kernel's dispatches, and those that finish their work."""

    label: str
    variant: Any
    calls: int
    dispatches: tuple[Dispatch, ...]

    @property
    def specs(self) -> frozenset[KernelSpec]:
        return frozenset(item.pipeline.spec for item in self.dispatches)


class ForcedTuning(Tuning):
    """The rules of tuning, except that one kernel uses a given variant wherever it can (None:
    nowhere)."""

    def __init__(self, device: Device, kernel: str, variant: Any) -> None:
        super().__init__(device)
        self.kernel, self.variant = kernel, variant

    def choose(self, rule: Callable[..., Any], *call: Any) -> Any:
        own = rule is RULES[self.kernel]
        own |= self.kernel == "matmul_matrix" and rule is expert_matrix_variant
        if self.kernel == "matmul_rows" and rule is few_rows:
            return call[0] > 1
        if self.kernel in OTHERS and rule in STAND_INS:
            return None
        if own and rule is matmul_rows_variant:
            rule = possible_variant  # used also where tiles are chosen
        chosen = rule(self, *call)
        if not own:
            return chosen
        forced = chosen is not None and self.variant is not None and serves(self.variant, *call)
        if isinstance(self.variant, RowsVariant):
            forced = self.variant.runs(self, *call)
        return self.variant if forced else chosen


class Sweep:
    """The variants of one kernel in the model of one engine.

    only: words that the labels of what is measured have. values: of fields, instead of GRIDS's.
    rows: of a step (0: a whole chunk of prefill, FEW_ROWS, or one).
    """

    def __init__(
        self,
        engine: Engine,
        kernel: str,
        *,
        only: Sequence[str] = (),
        values: dict[str, tuple[int, ...]] | None = None,
        rows: int = 0,
    ) -> None:
        self.engine, self.kernel, self.only = engine, kernel, set(only)
        self.values = GRIDS[kernel] | (values or {})
        few = kernel == "matmul_rows"
        self.prefill = kernel in PREFILL or few
        whole = FEW_ROWS if few else engine.runner.kinds.chunk if self.prefill else 1
        self.rows = rows or whole
        lowering = self._lower(None)
        rules = list(dict.fromkeys(self._variants(lowering).values()))
        if not rules:
            raise RequestError(
                f"{engine.device.adapter.name} runs no {kernel} in this model: choose another "
                "--kernel."
            )
        place_step(engine, [0] * self.rows, 0)
        plan = lowering.place(engine.runner.steps.arena)
        run(engine.device, [*plan.body, *plan.head], self.rows, self.rows)  # sensible activations
        self.groups = self._groups(lowering)
        if not self.groups:
            labels = {self._label(spec) for spec in self._variants(lowering)}
            raise RequestError(f"No shape matches --only. There are: {'; '.join(sorted(labels))}.")
        self.chosen = {group.label: group.specs for group in self.groups}
        self.variants = list(dict.fromkeys([*rules, *self._candidates(rules[0])]))

    def _candidates(self, like: Any) -> list[Any]:
        """Variants in a random order, so that a sweep that ends early has seen all of the grid."""
        names = asdict(like)
        unknown = self.values.keys() - names.keys()
        if unknown:
            raise RequestError(
                f"{type(like).__name__} has no {', '.join(sorted(unknown))}: {self.kernel} takes "
                f"{', '.join(sorted(names))}."
            )
        grid = [
            [(name, type(getattr(like, name))(value)) for value in values]
            for name, values in self.values.items()
        ]
        made = (replace(like, **dict(own)) for own in product(*grid))
        if isinstance(like, RowsVariant):  # teams are whole subgroups
            lanes = self.engine.device.subgroup_size
            made = (replace(one, n_lanes=max(1, lanes // one.k_lanes)) for one in made)
        variants = [variant for variant in made if valid(self.kernel, variant, self.engine)]
        random.Random(0).shuffle(variants)
        return variants

    def _lower(self, variant: Any) -> Lowering:
        """The model with this variant of the kernel everywhere, or with the rules' for None."""
        engine, steps, caches = self.engine, self.engine.runner.steps, self.engine.runner.caches
        target = target_of(
            engine.device,
            StepKind(self.rows, logits=1),
            fuse=engine.options.fuse,
            tuning=ForcedTuning(engine.device, self.kernel, variant),
        )
        output = engine.model.forward(engine.weights, caches.ropes, caches.layers)
        return lower(target, output, steps.step, steps.logits)

    def _variants(self, lowering: Lowering) -> dict[KernelSpec, Any]:
        """The variant of each of the swept kernels."""
        return {k.spec: k.variant for k in lowering.kernels if self._is_swept(k.spec)}

    def _is_swept(self, spec: KernelSpec) -> bool:
        return ALIKE.get(spec.name, spec.name) == self.kernel

    def _groups(self, lowering: Lowering) -> list[Group]:
        """The dispatches of each shape in order, with those that finish their work."""
        plan, of = lowering.place(self.engine.runner.steps.arena), self._variants(lowering)
        found: dict[str, list[Dispatch]] = {}
        calls: dict[str, int] = {}
        variants: dict[str, Any] = {}
        label = ""
        for item in (*plan.body, *plan.head):
            spec = item.pipeline.spec
            if spec in of:
                label = self._label(spec)
                calls[label] = calls.get(label, 0) + 1
                variants[label] = of[spec]
            elif spec.name not in SECOND or not label:
                continue
            found.setdefault(label, []).append(item)
        return [
            Group(label, variants[label], calls[label], tuple(items))
            for label, items in found.items()
            if self.only <= set(label.split())
        ]

    def _label(self, spec: KernelSpec) -> str:
        """Returns the label of a kernel's shape, without the parts that matmul_combine may do
        instead."""
        words = kernel_label(spec).split()
        return " ".join(w for w in words if not self.prefill or w not in ("bias", "residual"))

    def compile(self, variants: Sequence[Any]) -> dict[Any, Lowering | str]:
        """The lowered model for each variant, without kernels that do not compile; or, if no kernel
        of that variant is left, the error."""
        lowered = {variant: self._lower(variant) for variant in variants}
        specs = dict.fromkeys(k.spec for low in lowered.values() for k in low.kernels)
        with ThreadPoolExecutor(max_workers=8) as pool:
            errors = {s: e for s, e in zip(specs, pool.map(self._error, specs), strict=True) if e}
        results: dict[Any, Lowering | str] = {}
        for variant, low in lowered.items():
            bad = [k.spec for k in low.kernels if k.spec in errors]
            low.kernels = [k for k in low.kernels if k.spec not in errors]
            left = any(self._is_swept(k.spec) for k in low.kernels)
            results[variant] = low if left else errors[bad[0]] if bad else "does not run"
        return results

    def _error(self, spec: KernelSpec) -> str:
        try:
            self.engine.device.pipeline(spec)
        except InferError as error:
            return str(error)
        return ""

    def measure(
        self, lowering: Lowering, kv_len: int, repeats: int, done: set[Any]
    ) -> list[Result]:
        """A result for each shape whose kernels are not in `done`; they are added to it."""
        groups = [g for g in self._groups(lowering) if (g.label, kv_len, g.specs) not in done]
        done.update((g.label, kv_len, g.specs) for g in groups)
        place_step(self.engine, [0] * self.rows, kv_len - self.rows)
        seconds = profile_passes(
            self.engine.device,
            [group.dispatches for group in groups],
            self.rows,
            kv_len,
            repeats,
            least_seconds=LEAST_PASS,
        )
        return [
            Result(
                group.label,
                kv_len,
                numbers(group.variant),
                time / group.calls,
                sum(item.moved(self.rows, kv_len) for item in group.dispatches) / group.calls,
                sum(item.flops(self.rows, kv_len) for item in group.dispatches) / group.calls,
                group.specs == self.chosen.get(group.label),
            )
            for group, time in zip(groups, seconds, strict=True)
        ]

    def results(
        self, kv_lens: Sequence[int], repeats: int, seconds: float, batch: int = 8
    ) -> Iterator[tuple[int, Any, list[Result] | str]]:
        """Yields (number, variant, results or an error) for the variants, until the time is
        over."""
        end = time.perf_counter() + seconds
        done: set[Any] = set()
        for start in range(0, len(self.variants), batch):
            lowered = self.compile(self.variants[start : start + batch])
            for number, (variant, low) in enumerate(lowered.items(), start + 1):
                if time.perf_counter() > end:
                    return
                if isinstance(low, str):
                    yield number, variant, low
                    continue
                measured = partial(self.measure, low, repeats=repeats, done=done)
                yield number, variant, [r for kv_len in kv_lens for r in measured(kv_len)]


def numbers(variant: Any) -> dict[str, int]:
    """The fields of a variant that vary, which are all but the shape of a LoRA adapter's
    matrices."""
    return {name: int(value) for name, value in asdict(variant).items() if name != "shape"}


def words(variant: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items())


def table(results: Sequence[Result], most: int) -> str:
    """The fastest variants on one shape, and the one that the rules choose."""
    ordered = sorted(results, key=lambda result: result.seconds)
    best = ordered[0].seconds
    rows = [
        [
            "*" if r.chosen else "",
            f"{1e6 * r.seconds:,.2f}",
            f"{r.seconds / best:.3f}",
            f"{r.nbytes / r.seconds / 1e9:,.0f}",
            f"{r.flops / r.seconds / 1e12:.2f}",
            *map(str, r.variant.values()),
        ]
        for index, r in enumerate(ordered)
        if index < most or r.chosen
    ]
    header = ["", "µs", "of best", "GB/s", "TFLOP/s", *ordered[0].variant]
    title = f"{ordered[0].kernel}: {ordered[0].kv_len} positions, {len(ordered)} variants"
    return f"{title}\n\n{markdown_table(header, rows, left=1)}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="Time every variant of a kernel in a model.")
    parser.add_argument("--shape", choices=SHAPES, help="the shape of a model, on random weights")
    parser.add_argument("--model", help="a hub id, a folder, or demo")
    parser.add_argument("--device", help="index or part of the name of an adapter")
    parser.add_argument("--webgpu", help="the library that runs the kernels")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (a shape's: bf16)")
    parser.add_argument("--quantize", choices=QUANTIZED, help="quantise the weights instead")
    parser.add_argument("--format", choices=PUBLISHED, help="as such checkpoints pack them")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="f16")
    parser.add_argument("--kernel", choices=GRIDS, default="matmul_vec")
    parser.add_argument(
        "--depth", type=integers, default=(64,), metavar="N,N", help="tokens in the cache"
    )
    parser.add_argument(
        "--step-rows", type=int, default=0, help="of a step, up to a chunk of prefill"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), help="shapes with these words: K=4096 norm"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="stop the sweep after that")
    parser.add_argument("--repeats", type=int, default=7, help="runs, of which the median counts")
    parser.add_argument("--top", type=int, default=12, help="variants in a table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    grid = parser.add_argument_group("values to try, instead of all of them")
    names = list(dict.fromkeys(name for grid in GRIDS.values() for name in grid))
    names += [field.name for field in fields(RowsVariant) if field.name not in names]
    for name in names:
        # --depth is of the cache.
        flag = "tile-depth" if name == "depth" else name.replace("_", "-")
        grid.add_argument(f"--{flag}", dest=f"of_{name}", type=integers, metavar="N,N")
    options = parser.parse_args(argv)
    given = {name: getattr(options, f"of_{name}") for name in names}
    values = {name: tried for name, tried in given.items() if tried is not None}
    needed = max(options.depth) + 1
    try:
        subject = Subject(
            model=options.model,
            shape=options.shape,
            format=options.format,
            device=options.device,
            webgpu=options.webgpu,
            context=needed if needed > DEFAULT_CONTEXT else None,
            dtype=options.dtype,
            quantize=options.quantize,
            kv_dtype=options.kv_dtype,
        )
        with open_engine(subject) as (name, engine):
            rows = options.step_rows
            sweep = Sweep(engine, options.kernel, only=options.only, values=values, rows=rows)
            _run(sweep, name, options)
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(sweep: Sweep, name: str, options: argparse.Namespace) -> None:
    adapter = sweep.engine.device.adapter
    print(f"{name} on {adapter}: {len(sweep.variants)} variants of {sweep.kernel}, µs of")
    for index, group in enumerate(sweep.groups, 1):
        print(f"  [{index}] {group.label} ({group.calls} calls)")
    kv_lens = [sweep.rows] if sweep.prefill else [depth + 1 for depth in options.depth]
    results: list[Result] = []
    try:
        for number, variant, found in sweep.results(kv_lens, options.repeats, options.seconds):
            text = found if isinstance(found, str) else _line(sweep, found)
            print(f"{number:4} {words(numbers(variant))}  {text}", flush=True)
            results += [] if isinstance(found, str) else found
    except KeyboardInterrupt:
        print("interrupted")
    shapes = dict.fromkeys((result.kernel, result.kv_len) for result in results)
    for shape in shapes:
        same = [result for result in results if (result.kernel, result.kv_len) == shape]
        print(f"\n{table(same, options.top)}", flush=True)
    if options.json is not None:
        report = {
            "model": name,
            "dtype": options.quantize or options.format or options.dtype,
            "adapter": adapter.name,
        }
        report["driver"] = adapter.driver
        options.json.write_text(
            json.dumps(report | {"results": [asdict(result) for result in results]}, indent=1),
            encoding="utf-8",
        )


def _line(sweep: Sweep, results: Sequence[Result]) -> str:
    """The times of a variant, each behind the number of its shape. A shape that is labelled
    differently with this variant stands with its label."""
    names = {group.label: str(index) for index, group in enumerate(sweep.groups, 1)}
    return "  ".join(
        f"[{names.get(r.kernel, r.kernel)}] {1e6 * r.seconds:.2f}{'*' if r.chosen else ''}"
        for r in results
    )


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
