"""What the steps of a model keep on the GPU: keys and values, states of layers, rotary tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from infer.engine.options import EngineOptions
from infer.engine.speculation import MAX_DRAFT
from infer.engine.windows import window_pages
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.ops.rope import Rope
from infer.kernels.state.hidden_states import HiddenStates
from infer.kernels.state.kv_cache import PAGE, KVCache, KVShape, LayerCache
from infer.kernels.state.layer_state import Cache, LayerState
from infer.kernels.state.saved_states import SavedStates, State
from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.rope import rope_table, table_bytes
from infer.models.loading.config import RopeConfig


class Caches:
    """The memory of sequences of one model on one device.

    kv: keys and values of layers with attention. windows: those of layers with a window, where
    these have pages of their own, window_pages at most. layers: the cache or state of each layer.
    rope: the rotary table of most layers. ropes: the table of each layer, None where nothing is
    rotated. predicted: the cache of a layer that predicts further tokens, and last_hidden: the
    hidden states that it begins from. saved: states that other sequences can go on from; None where
    no layer has a state.
    """

    def __init__(
        self,
        device: Device,
        config: DecoderConfig,
        options: EngineOptions,
        *,
        drafts: bool = False,
        pages: Buffer | None = None,
        predictor: DecoderConfig | None = None,
    ) -> None:
        """drafts: steps verify drafts. pages: the page table, if it is another model's. predictor:
        the config of a layer that predicts further tokens. Raises OutOfMemoryError."""
        self._device, self.context = device, options.context
        self.windows: KVCache | None = None
        # A draft model has the page table of its target for all layers.
        self.window_pages = 0 if pages is not None else window_pages(config, options)
        own = list(zip(config.kv_shapes, config.kv_windows, strict=True))
        wide = [shape for shape, window in own if not (window and self.window_pages)]
        if self.window_pages:
            narrow = [shape for shape, window in own if window]
            first = min(options.first_pages, self.window_pages)
            self.windows = self._cache(narrow, options, first)
        wide += [] if predictor is None else predictor.kv_shapes
        self.kv = self._cache(wide, options, options.first_pages, pages)
        self.layers = self._layers(config, options.max_batch, MAX_DRAFT if drafts else 0)
        self._tables: list[tuple[RopeConfig, Rope]] = []
        self.rope = self._upload(config.rope)
        local = self.rope if config.local_rope is None else self._upload(config.local_rope)
        self.ropes = [
            (local if window else self.rope) if rotated else None
            for window, rotated in zip(config.windows, config.rope_layers, strict=True)
        ]
        self.predicted: LayerCache | None = None
        self.last_hidden: HiddenStates | None = None
        states: list[State] = [own for own in self.layers if isinstance(own, LayerState)]
        if predictor is not None:
            self.last_hidden = HiddenStates.new(device, config.hidden_size, options.max_batch)
            states += [self.last_hidden] if states else []
            self.predicted = replace(self.kv.layers[-1], first=1)
        self.saved: SavedStates | None = None
        if states:
            places = min(2 * options.max_batch, options.most_state_places)
            self.saved = SavedStates(device, states, places)

    def _cache(
        self,
        shapes: Sequence[KVShape],
        options: EngineOptions,
        n_pages: int,
        pages: Buffer | None = None,
    ) -> KVCache:
        return KVCache(
            self._device,
            shapes,
            options.context,
            sequences=options.max_batch,
            dtype=options.kv_dtype,
            n_pages=n_pages,
            pages=pages,
        )

    def _layers(self, config: DecoderConfig, sequences: int, drafts: int) -> list[Cache]:
        found: list[Cache] = []
        in_windows = iter(() if self.windows is None else self.windows.layers)
        in_cache = iter(self.kv.layers)
        keys_and_values = (
            next(in_windows if window and self.windows else in_cache)
            for window in config.kv_windows
        )
        for layer, (shape, source) in enumerate(zip(config.states, config.kv_sources, strict=True)):
            if shape is not None:
                found.append(LayerState.new(self._device, shape, layer, sequences, drafts))
            else:
                found.append(next(keys_and_values) if source == layer else found[source])
        return found

    def _upload(self, rope: RopeConfig) -> Rope:
        positions = self.positions
        nbytes = table_bytes(rope, positions)
        table = self._device.made(nbytes, lambda: rope_table(rope, positions), "rope table")
        made = Rope(table, rope.rotary_dim, rope.interleaved)
        self._tables.append((rope, made))
        return made

    @property
    def pools(self) -> list[KVCache]:
        """The caches of keys and values: of most layers, and of those with a window."""
        return [self.kv, *([] if self.windows is None else [self.windows])]

    @property
    def n_pages(self) -> tuple[int, int]:
        """Pages that there is memory for: of most layers, and of those with a window."""
        return self.kv.n_pages, 0 if self.windows is None else self.windows.n_pages

    @property
    def positions(self) -> int:
        """How many positions of one sequence the cache has pages for now, at most the context."""
        return min(self.context, self.kv.n_pages * PAGE)

    def grow(self, n_pages: int, length: int, window_pages: int = 0) -> None:
        """Have so many pages, and rotary tables for their positions. length: of the sequences that
        the tables are for (`rope.table_length`). window_pages: of layers with a window, if they
        have their own. Raises OutOfMemoryError."""
        # Tables come first: the cache has no pages for positions that are in no table.
        first, positions = self.positions, min(self.context, n_pages * PAGE)
        for rope, made in self._tables if positions > first else ():
            before = table_bytes(rope, first)
            self._device.grow(made.table, table_bytes(rope, positions), [(0, 0, before)])
            rest = rope_table(rope, positions, length, first)
            self._device.write(made.table, rest, before)
        if self.windows is not None:
            self.windows.grow(window_pages)
        self.kv.grow(n_pages)
