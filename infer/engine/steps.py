"""The steps of a model on the GPU: what each kind of step dispatches, and the buffers it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from infer.engine.caches import Caches
from infer.engine.kinds import Kind, Kinds, largest_chunk, logits_bytes
from infer.engine.options import EngineOptions
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.errors import OutOfMemoryError, UnsupportedError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import DispatchPlan
from infer.kernels.gpu.tensor import GpuTensor, allocate
from infer.kernels.lowering.arena import Arena
from infer.kernels.lowering.graph import Graph, Value
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import MAX_VEC_ROWS, StepKind, Target, padded_rows, stride
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import Attention
from infer.kernels.ops.experts import ExpertDown
from infer.kernels.ops.linear import Changes, Linear
from infer.kernels.state.step import step_bytes
from infer.models.blocks.decoder import Decoder, before_head
from infer.models.blocks.mtp import Predictor
from infer.models.loading.lora import NO_ADAPTERS, Adapters


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model and its weights on a device. adapters: low-rank changes beside the weights."""

    model: Decoder
    weights: Mapping[str, GpuTensor]
    adapters: Adapters = NO_ADAPTERS


class Steps:
    """The kinds of step of one model on one device, and what they share: the caches, the step
    buffer with a step's rows, the logits and the activations.

    Each kind of step is lowered, compiled and placed when it is first needed; what one answer needs
    is lowered at once, and compiled by `compile`.
    """

    def __init__(
        self,
        device: Device,
        own: Loaded,
        options: EngineOptions,
        *,
        draft_rows: int = 0,
        pages: Buffer | None = None,
        predictor: Loaded | None = None,
        follows: Steps | None = None,
    ) -> None:
        """draft_rows: the most rows of a step that verifies drafts; 0 if none does. pages: the page
        table, if it is another model's. predictor: a layer that predicts further tokens; the steps
        then compute its keys and values for every position, too. follows: if these are the steps of
        such a layer, those of its model; they have one row for each sequence. Raises
        OutOfMemoryError, and UnsupportedError for what an adapter changes."""
        self.device, self.adapters, self.context = device, own.adapters, options.context
        self._fuse, self._invariant = options.fuse, options.invariant
        model, config = own.model, own.model.config
        self._follows, self._hidden_size = follows, config.hidden_size
        if follows is None:
            of_predictor = None if predictor is None else predictor.model.config
            self.caches = Caches(
                device,
                config,
                options,
                drafts=draft_rows > 0,
                pages=pages,
                predictor=of_predictor,
            )
            layers, ropes = self.caches.layers, self.caches.ropes
        else:
            self.caches = follows.caches
            assert self.caches.predicted is not None
            layers, ropes = [self.caches.predicted], [self.caches.rope]
        self._traced = model.forward(own.weights, ropes, layers)
        self._also = self._beside(own, predictor)
        values = Graph(self._traced, self._also).values
        for changes in (self.adapters.always, self.adapters.by_row):
            _check_projections(values, own.weights, changes)
        kind = StepKind(options.prefill_chunk, invariant=options.invariant)
        prefill = Target(device, kind, Tuning(device), options.fuse)
        bound = device.limits.max_binding // (4 * stride(_widest(values, prefill))) // 128 * 128
        chunk = largest_chunk(bound, options)
        self.kinds = Kinds(device, config, options, chunk=chunk, draft_rows=draft_rows)
        if follows is not None:
            self.kinds.only_decode()
        self.most_rows = self.kinds.most_rows  # that are sampled
        most = max(chunk, MAX_VEC_ROWS, self.most_rows)
        self.step = device.buffer(step_bytes(most), label="step")
        rows = padded_rows(max(self.kinds.batches, default=1))
        self.logits = device.buffer(logits_bytes(config.vocab_size, rows), label="logits")
        self.lowered = {
            kind.with_adapters(by_row): self._lower(kind.with_adapters(by_row))
            for kind in dict.fromkeys([*self.kinds.first, *self.kinds.largest])
            for by_row in self._ways
        }
        self.arena = Arena(device)
        self._reserve(chunk)
        self._plans: dict[Kind, DispatchPlan] = {}

    def _beside(self, own: Loaded, predictor: Loaded | None) -> tuple[Value, ...]:
        """Returns the values that steps compute besides the logits."""
        caches = self.caches
        if predictor is not None:
            behind = predictor.model
            assert isinstance(behind, Predictor)
            assert caches.last_hidden is not None
            assert caches.predicted is not None
            of = predictor.weights, caches.rope, caches.predicted
            return tuple(behind.of(caches.last_hidden).beside(self._traced, own.weights, *of))
        if isinstance(own.model, Predictor):
            return tuple(own.model.also(self._traced))
        return ()

    def _reserve(self, chunk: int) -> None:
        """Have room for the activations of what is lowered. Raises OutOfMemoryError."""
        sizes = [lowering.sizes for lowering in self.lowered.values()]
        largest = max([self.logits.nbytes, *(size for own in sizes for size in own)])
        most_rows = [*self.kinds.batches[-1:], *([chunk] if self._invariant else [])]
        most = self.device.limits.max_binding
        if most_rows and largest > most:
            raise OutOfMemoryError(
                f"Steps of {max(most_rows)} rows need a buffer of {largest:,} bytes; one binding "
                f"of this GPU holds {most:,}. Ask for fewer answers at once (`max_batch`)"
                f"{' or a smaller `context`' if self._invariant else ''}."
            )
        self.arena.reserve([max(same) for same in zip_longest(*sizes, fillvalue=0)])

    def grow(self, n_pages: int, length: int, window_pages: int = 0) -> None:
        """`Caches.grow`. No plan may be in use: all are made anew when they are next needed."""
        self._plans.clear()  # if some layers alone can grow, too
        if self._follows is None:
            self.caches.grow(n_pages, length, window_pages)

    @cached_property
    def hidden(self) -> Buffer:
        """The hidden states of a step's rows, after the last norm; there when first asked for."""
        row = stride(before_head(self._traced).width)
        nbytes = 4 * row * padded_rows(self.kinds.chunk)
        return self.device.buffer(nbytes, label="hidden states")

    @cached_property
    def given(self) -> GpuTensor:
        """The rows [rows, hidden_size] that are given for tokens of a step; there when first asked
        for."""
        shape = self.kinds.chunk, self._hidden_size
        return allocate(self.device, shape, "f32", "rows given for tokens")

    @cached_property
    def scored(self) -> Buffer:
        """The logits of all rows of a step; there when first asked for."""
        nbytes = 4 * stride(self._traced.width) * padded_rows(self.kinds.scored.rows)
        return self.device.buffer(nbytes, label="logits of all rows")

    @property
    def _ways(self) -> tuple[bool, ...]:
        """The values of `Kind.by_row` that steps have: both, if any LoRA adapter has a name."""
        return (False, True) if self.adapters.names else (False,)

    def _lower(self, kind: Kind) -> Lowering:
        if kind.output == "hidden states":
            return self.lower(kind, self.hidden, before_head(self._traced), ())
        if kind.output == "all logits":
            return self.lower(kind, self.scored, self._traced, ())
        return self.lower(kind, self.logits, self._traced, self._also)

    def lower(self, kind: Kind, buffer: Buffer, output: Value, also: Iterable[Value]) -> Lowering:
        """The kernels of a kind of step that writes `output` into a buffer. also: what it computes
        besides."""
        changes = self.adapters.by_row if kind.by_row else self.adapters.always
        given = self.given if kind.given else None
        target = target_of(self.device, kind.shape, fuse=self._fuse, given=given)
        return lower(target, output, self.step, buffer, changes=changes, also=also)

    def compile(self, progress: Callable[[int, int], None] | None = None, *others: Steps) -> None:
        """Compile, in threads, what every generation needs, so that none has to wait for it; but
        for batches, of which most sizes may never come. others: on the same device.
        `progress` gets how many kernels are done, and how many there are."""
        wanted = [
            (steps, kind.with_adapters(by_row))
            for steps in (self, *others)
            for kind in steps.kinds.first
            for by_row in steps._ways
        ]
        specs = [kernel.spec for steps, kind in wanted for kernel in steps._lowered(kind).kernels]
        self.device.pipelines(specs, progress)
        for steps, kind in wanted:
            steps.plan(kind)

    def lower_again(self) -> None:
        """Lower anew what has been lowered, of weights that have `row_scales` now. No plan may be
        in use."""
        self.lowered = {kind: self._lower(kind) for kind in self.lowered}
        self._plans.clear()

    def compile_batches(self) -> None:
        """Compile the rest, so that an answer that joins others lets nobody wait."""
        kinds = [kind.with_adapters(way) for kind in self.kinds.of_company for way in self._ways]
        self.device.pipelines(
            [kernel.spec for kind in kinds for kernel in self._lowered(kind).kernels]
        )
        for kind in kinds:
            self.plan(kind)

    def plan(self, kind: Kind) -> DispatchPlan:
        """Returns the dispatches of a kind of step. They are placed, and compiled if they are not
        yet, when first asked for."""
        if kind not in self._plans:
            self._plans[kind] = self._lowered(kind).place(self.arena)
        return self._plans[kind]

    def _lowered(self, kind: Kind) -> Lowering:
        if kind not in self.lowered:
            self.lowered[kind] = self._lower(kind)
        return self.lowered[kind]


def _check_projections(
    values: Iterable[Value], weights: Mapping[str, GpuTensor], changes: Changes
) -> None:
    """Raises UnsupportedError for changes of something else."""
    projections = {value.weight for value in values if isinstance(value, Linear)}
    names = [n for n, w in weights.items() if w in changes and w not in projections]
    if names:
        raise UnsupportedError(
            f"An adapter changes {', '.join(names[:10])}, which is no projection of its own. "
            "Merge the adapter into the model, and load what that gives."
        )


def _widest(values: Iterable[Value], target: Target) -> int:
    """Returns the number of values of the widest activation that is written for every row of a
    step."""
    widest = 0
    for value in values:
        if value.of_logits:  # of one row
            continue
        widest = max(widest, value.width)
        if isinstance(value, ExpertDown):  # each of a row's experts makes a row of its own
            widest = max(widest, value.routing.all_slots * stride(value.width))
        elif isinstance(value, Attention):
            widest = max(widest, value.between(target))
    return widest
