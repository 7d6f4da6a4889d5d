"""The kinds of step of a model, and what each dispatches. All of it is made before any token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from infer.engine.options import MAX_BATCH, EngineOptions
from infer.engine.speculation import MAX_DRAFT
from infer.engine.windows import window_pages
from infer.kernels.compiler.arena import Arena
from infer.kernels.compiler.compile import lower
from infer.kernels.compiler.graph import Graph, Value, stride
from infer.kernels.compiler.lowering import Lowering
from infer.kernels.compiler.target import MAX_VEC_ROWS, StepKind, Target, padded_rows
from infer.kernels.compiler.tuning import Tuning
from infer.kernels.errors import OutOfMemoryError, UnsupportedError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import DispatchPlan
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.ops.attention import Attention
from infer.kernels.ops.experts import ExpertDown
from infer.kernels.ops.linear import Changes, Linear
from infer.kernels.ops.matmul_rows import few_rows
from infer.kernels.ops.rope import Rope
from infer.kernels.state.hidden import HiddenStates
from infer.kernels.state.kv_cache import PAGE, KVCache, LayerCache
from infer.kernels.state.layer_state import Cache, LayerState
from infer.kernels.state.saved_states import SavedStates, State
from infer.kernels.state.step import MAX_PROMPTS, step_bytes
from infer.models.blocks.decoder import Decoder, before_head
from infer.models.blocks.mtp import Predictor
from infer.models.blocks.rope import rope_table, table_bytes
from infer.models.loading.config import RopeConfig
from infer.models.loading.lora import Adapters

HIDDEN = "hidden "  # prefix of the kinds of step that give hidden states instead of logits
PACKED = "packed "  # prefix of the kinds of step that hold several prompts
SCORED = "scored"  # the kind of step of one sequence that gives the logits of all its rows
_SHORT = 256, 128  # rows of prefill steps with their own tile sizes; a CPU has one size for all
_SHORTEST = 64, 32, 16  # rows of prefill steps without tiles, which read each weight once
# Rows that kernels of batches are made for.
_BATCHES = 2, 4, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, MAX_BATCH
_SOFTWARE_BATCHES = 4, 8  # besides the largest; software kernels take at most 16 rows


class Steps:
    """The steps of one model on one device, and what they share: the cache, the rotary tables, the
    step buffer, the logits and the activations. If adapters have names, each kind of step exists
    twice: without adapters, and by row, where each row has its own adapter or none.

    cache: keys and values of layers; windows: of those with a window, where these have pages of
    their own.

    rows: kinds of step of one sequence, and the most rows of each, the largest first. Each of them
    has a twin, prefixed HIDDEN, that gives the hidden states of all rows. SCORED has scored_rows.
    batches: row counts of the kinds of step whose rows each name their sequence, the smallest
    first. With drafts, several rows may belong to one sequence, at consecutive positions; such a
    step has as many rows as one of draft_kinds, and kinds of its own where layers have a state.
    prompts: the most sequences in one prefill step; the larger kinds then have a twin, prefixed
    PACKED, for several prompts.
    """

    def __init__(
        self,
        device: Device,
        model: Decoder,
        weights: Mapping[str, GpuTensor],
        adapters: Adapters,
        options: EngineOptions,
        *,
        draft_rows: int = 0,
        pages: Buffer | None = None,
        predictor: tuple[Predictor, Mapping[str, GpuTensor]] | None = None,
        follows: Steps | None = None,
    ) -> None:
        """adapters: low-rank changes beside the weights. draft_rows: the most rows of a step that
        verifies drafts; 0 if none does. pages: the page table, if it is another model's. predictor:
        a layer that predicts further tokens, and its weights; the steps then compute its keys and
        values for every position, too. follows: if these are the steps of such a layer, those of
        its model; they have one row for each sequence. Raises OutOfMemoryError, and
        UnsupportedError for what an adapter changes."""
        self.device, self.adapters, self.context = device, adapters, options.context
        self._fuse, self._invariant = options.fuse, options.invariant
        fuse, invariant, max_batch = options.fuse, options.invariant, options.max_batch
        c = model.config
        self.predicted: LayerCache | None = None  # the cache of the predictor's layer
        self.last_hidden: HiddenStates | None = None
        self.caches: list[Cache] = []  # of each layer
        self._owns_cache = follows is None
        self.windows: KVCache | None = None  # of layers with a window, if they have their own pages
        self.window_pages = 0  # of that, at most
        if follows is not None:
            assert follows.predicted is not None
            self.cache: KVCache = follows.cache
            self.rope: Rope = follows.rope
            self.caches.append(follows.predicted)
        else:
            shapes = list(zip(c.kv_shapes, c.kv_windows, strict=True))
            own_pages = partial(
                KVCache, device, sequences=max_batch, dtype=options.kv_dtype, pages=pages
            )
            # A draft model has the page table of its target for all layers.
            self.window_pages = 0 if pages is not None else window_pages(c, options)
            if self.window_pages:
                narrow = [shape for shape, window in shapes if window]
                shapes = [(shape, window) for shape, window in shapes if not window]
                first = min(options.first_pages, self.window_pages)
                self.windows = own_pages(narrow, self.context, n_pages=first)
            wide = [shape for shape, _ in shapes]
            if predictor is not None:
                wide += predictor[0].config.kv_shapes
            self.cache = own_pages(wide, self.context, n_pages=options.first_pages)
            in_windows = iter(() if self.windows is None else self.windows.layers)
            in_cache = iter(self.cache.layers)
            keys_and_values = (
                next(in_windows if window and self.windows else in_cache) for window in c.kv_windows
            )
            for layer, (shape, source) in enumerate(zip(c.states, c.kv_sources, strict=True)):
                if shape is not None:
                    drafts = MAX_DRAFT if draft_rows else 0
                    own_state = LayerState.new(device, shape, layer, max_batch, drafts)
                    self.caches.append(own_state)
                else:
                    own = source == layer
                    self.caches.append(next(keys_and_values) if own else self.caches[source])
            self._uploaded: list[tuple[RopeConfig, Rope]] = []
            self.rope = self._upload(c.rope)
        local = self.rope if c.local_rope is None else self._upload(c.local_rope)
        self.ropes = [
            (local if window else self.rope) if rotated else None
            for window, rotated in zip(c.windows, c.rope_layers, strict=True)
        ]
        states: list[State] = [cache for cache in self.caches if isinstance(cache, LayerState)]
        self._ways = (False, True) if adapters.names else (False,)  # by row, or not
        self._traced = model.forward(weights, self.ropes, self.caches)
        self._also: tuple[Value, ...] = ()  # what steps do besides
        if predictor is not None:
            behind, own_weights = predictor
            self.last_hidden = HiddenStates.new(device, c.hidden_size, max_batch)
            states += [self.last_hidden] if states else []
            self.predicted = replace(self.cache.layers[-1], first=1)
            of = own_weights, self.rope, self.predicted
            self._also = tuple(behind.of(self.last_hidden).beside(self._traced, weights, *of))
        elif isinstance(model, Predictor):
            self._also = tuple(model.also(self._traced))
        self.saved: SavedStates | None = None
        if states:
            places = min(2 * max_batch, options.most_state_places)
            self.saved = SavedStates(device, states, places)
        values = Graph(self._traced, self._also).values
        for changes in (adapters.always, adapters.by_row):
            _check_projections(values, weights, changes)
        kind = StepKind(options.prefill_chunk, invariant=invariant)
        prefill = Target(device, kind, Tuning(device), fuse)
        bound = device.limits.max_binding // (4 * stride(_widest(values, prefill))) // 128 * 128
        if invariant:  # kernels of a few rows have no more
            bound = min(bound, MAX_BATCH)
        chunk = max(16, min(options.prefill_chunk, self.context, bound))
        draft_rows = next(rows for rows in (0, *_BATCHES) if rows >= draft_rows)
        self.most_rows = max(max_batch, draft_rows)  # that are sampled
        most = max(chunk, MAX_VEC_ROWS, self.most_rows)
        self.step = device.buffer(step_bytes(most), label="step")
        self.batches = _batches(self.most_rows, device)
        self.draft_kinds = [rows for rows in self.batches if rows <= draft_rows]
        self._drafting = "drafts" if any(c.states) else "batch"
        logits_rows = padded_rows(max(self.batches, default=1))
        self.logits = device.buffer(4 * stride(c.vocab_size) * logits_rows, label="logits")
        self.rows = {"prefill": chunk}
        if not device.software:
            short = (
                *_SHORT,
                *(_SHORTEST if few_rows(Tuning(device), 16) and not invariant else ()),
            )
            self.rows |= {f"prefill of {rows}": rows for rows in short if rows < chunk}
        # A state is scanned along the rows of one sequence.
        alone = max_batch == 1 or invariant or any(c.states)
        self.prompts = 1 if alone else min(MAX_PROMPTS, self.batches[-1])
        self.packed = {f"{PACKED}{n}": rows for n, rows in self.rows.items() if self.prompts > 1}
        self.rows |= {"few": MAX_VEC_ROWS, "decode": 1}
        if follows is not None:
            self.rows, self.packed, self.prompts = {"decode": 1}, {}, 1
        kinds = {name: StepKind(rows, logits=1) for name, rows in self.rows.items()}
        kinds |= {
            name: StepKind(rows, logits=self.prompts, prompts=self.prompts)
            for name, rows in self.packed.items()
        }
        self._kinds = kinds | {f"batch {rows}": StepKind(rows, batch=True) for rows in self.batches}
        self._kinds |= {f"{HIDDEN}{name}": StepKind(rows) for name, rows in self.rows.items()}
        if any(c.states):
            drafting = {n: StepKind(n, batch=True, drafts=MAX_DRAFT) for n in self.draft_kinds}
            self._kinds |= {self.drafts(rows): kind for rows, kind in drafting.items()}
        # For more than a few rows, matmul writes whole tiles.
        tile = padded_rows(MAX_VEC_ROWS + 1)
        has_room = device.limits.max_binding >= 4 * stride(c.vocab_size) * tile
        self.scored_rows = min(chunk, tile if has_room else MAX_VEC_ROWS)
        self._kinds[SCORED] = StepKind(self.scored_rows)
        # One answer needs these, drafts among them. Other batches take less room than the largest,
        # and are made when they are needed, as hidden states are.
        few = [self.drafts(rows) for rows in self.draft_kinds if rows <= MAX_VEC_ROWS]
        self._first = [*self.rows, *few]
        largest_kinds = [f"batch {rows}" for rows in self.batches[-1:]]
        largest_kinds += [self.drafts(rows) for rows in self.draft_kinds[-1:]]
        lowered = dict.fromkeys([*self._first, *largest_kinds])
        self.lowered = {
            (kind, by_row): self.lower(self._kinds[kind], self.logits, by_row)
            for kind in lowered
            for by_row in self._ways
        }
        sizes = [lowering.sizes for lowering in self.lowered.values()]
        largest = max([self.logits.nbytes, *(size for own in sizes for size in own)])
        most_rows = [*self.batches[-1:], *([chunk] if invariant else [])]
        if most_rows and largest > device.limits.max_binding:
            raise OutOfMemoryError(
                f"Steps of {max(most_rows)} rows need a buffer of {largest:,} bytes; one binding "
                f"of this GPU holds {device.limits.max_binding:,}. Ask for fewer answers at once "
                f"(`max_batch`){' or a smaller `context`' if invariant else ''}."
            )
        self.arena = Arena(device)
        self.arena.reserve([max(same) for same in zip_longest(*sizes, fillvalue=0)])
        self._plans: dict[tuple[str, bool], DispatchPlan] = {}

    @property
    def positions(self) -> int:
        """How many positions of a sequence the cache has pages for now, at most the context."""
        return min(self.context, self.cache.n_pages * PAGE)

    def _upload(self, rope: RopeConfig) -> Rope:
        positions = self.positions
        nbytes = table_bytes(rope, positions)
        table = self.device.made(nbytes, lambda: rope_table(rope, positions), "rope table")
        made = Rope(table, rope.rotary_dim, rope.interleaved)
        self._uploaded.append((rope, made))
        return made

    def grow(self, n_pages: int, length: int, window_pages: int = 0) -> None:
        """Have a cache of so many pages, and rotary tables for its positions. length: of the
        sequences that the tables are for (`rope.table_length`). window_pages: those of layers with
        a window, if they have their own. No plan may be in use: all are made anew when they are
        next needed. Raises OutOfMemoryError."""
        self._plans.clear()  # if some layers alone can grow, too
        if self._owns_cache:
            first = self.positions
            if self.windows is not None:
                self.windows.grow(window_pages)
            self.cache.grow(n_pages)
            positions = self.positions
            for rope, made in self._uploaded if positions > first else ():
                before = table_bytes(rope, first)
                self.device.grow(made.table, table_bytes(rope, positions), [(0, 0, before)])
                rest = rope_table(rope, positions, length, first)
                self.device.write(made.table, rest, before)

    @cached_property
    def hidden(self) -> Buffer:
        """The hidden states of a step's rows, after the last norm; there when first asked for."""
        row = stride(before_head(self._traced).width)
        nbytes = 4 * row * padded_rows(self.rows["prefill"])
        return self.device.buffer(nbytes, label="hidden states")

    @cached_property
    def scored(self) -> Buffer:
        """The logits of all rows of a step; there when first asked for."""
        nbytes = 4 * stride(self._traced.width) * padded_rows(self.scored_rows)
        return self.device.buffer(nbytes, label="logits of all rows")

    def lower(self, kind: StepKind, logits: Buffer, by_row: bool) -> Lowering:
        """The kernels of a kind of step. by_row: its rows have adapters."""
        return self._lower(self._traced, kind, logits, by_row, self._also)

    def _lower(
        self,
        output: Value,
        kind: StepKind,
        buffer: Buffer,
        by_row: bool,
        also: Iterable[Value] = (),
    ) -> Lowering:
        kind = replace(kind, invariant=self._invariant)
        changes = self.adapters.by_row if by_row else self.adapters.always
        own: dict[str, Any] = {"fuse": self._fuse, "changes": changes, "also": also}
        return lower(self.device, output, kind, self.step, buffer, **own)

    def compile(self, progress: Callable[[int, int], None] | None = None, *others: Steps) -> None:
        """Compile, in threads, what every generation needs, so that none has to wait for it; but
        for batches, of which most sizes may never come. others: on the same device.
        `progress` gets how many kernels are done, and how many there are."""
        wanted = [(steps, key) for steps in (self, *others) for key in steps._first_keys]
        specs = [kernel.spec for steps, key in wanted for kernel in steps._lowered(*key).kernels]
        self.device.pipelines(specs, progress)
        for steps, key in wanted:
            steps.plan(*key)

    def lower_again(self) -> None:
        """Lower anew what has been lowered, of weights that have `row_scales` now. No plan may be
        in use."""
        self.lowered = {
            (kind, by_row): self.lower(self._kinds[kind], self.logits, by_row)
            for kind, by_row in self.lowered
        }
        self._plans.clear()

    @property
    def _first_keys(self) -> list[tuple[str, bool]]:
        return [key for key in self.lowered if key[0] in self._first]

    def compile_batches(self) -> None:
        """Compile the rest, so that an answer that joins others lets nobody wait."""
        kinds = [*(f"batch {rows}" for rows in self.batches), *self.packed]
        kinds += [kind for kind in map(self.drafts, self.draft_kinds) if kind not in kinds]
        keys = [(kind, by_row) for kind in kinds for by_row in self._ways]
        self.device.pipelines(
            [kernel.spec for key in keys for kernel in self._lowered(*key).kernels]
        )
        for key in keys:
            self.plan(*key)

    def plan(self, kind: str, by_row: bool) -> DispatchPlan:
        """Made, and compiled where it is not yet, when it is first needed."""
        key = kind, by_row
        if key not in self._plans:
            self._plans[key] = self._lowered(kind, by_row).place(self.arena)
        return self._plans[key]

    def _lowered(self, kind: str, by_row: bool) -> Lowering:
        key = kind, by_row
        if key not in self.lowered:
            if kind.startswith(HIDDEN):
                of = before_head(self._traced), self._kinds[kind], self.hidden
                self.lowered[key] = self._lower(*of, by_row)
            elif kind == SCORED:
                of = self._traced, self._kinds[kind], self.scored
                self.lowered[key] = self._lower(*of, by_row)
            else:
                self.lowered[key] = self.lower(self._kinds[kind], self.logits, by_row)
        return self.lowered[key]

    def gathers(self, kind: str) -> int:
        """How many rows have logits, at most, which the step names; 0: they are of all rows."""
        if kind in self.packed:
            return self.prompts
        return int(kind in self.rows and kind != "decode")

    def prefill(self, rows: int, prompts: int = 1) -> str:
        """The kind of step of so many rows of a prompt, or of several."""
        kinds = self.rows if prompts == 1 else self.packed
        return next(kind for kind, n in reversed(kinds.items()) if n >= rows)

    def batch(self, rows: int) -> str:
        """The kind of step of so many rows, each of a sequence of its own."""
        return "decode" if rows == 1 else f"batch {self.rows_of(rows)}"

    def drafts(self, rows: int) -> str:
        """The kind of step of so many rows, several of which may be of one sequence (drafts)."""
        return f"{self._drafting} {self.rows_of(rows)}"

    def rows_of(self, rows: int) -> int:
        """Returns the rows of the smallest kind of batch that has room for so many."""
        return next(n for n in self.batches if n >= rows)


def _batches(most: int, device: Device) -> list[int]:
    """Rows of the kinds of batches. A CPU has few: compiling takes it longer than idle rows."""
    if most == 1:
        return []
    enough = next(rows for rows in _BATCHES if rows >= most)
    kinds = _SOFTWARE_BATCHES if device.software else _BATCHES
    return [*(rows for rows in kinds if rows < enough), enough]


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
    """How many values the widest thing has that is written for every row of a step."""
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
