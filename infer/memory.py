"""How much memory a model takes, counted before anything is allocated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from infer.engine.draft import check_draft
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.engine.windows import all_have_windows, useful_positions, window_of, window_pages
from infer.kernels.errors import OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, memory_info
from infer.kernels.gpu.device import Device, DryDevice, Limits
from infer.kernels.gpu.quantize import buffer_bytes
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.state.kv_cache import PAGE, keys_bytes, kv_cache_bytes
from infer.keywords import Progress
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.rope import table_bytes
from infer.models.loading.load import load_weights
from infer.models.loading.lora import NO_LORAS, Loras
from infer.models.loading.plan import LoadPlan

DEFAULT_CONTEXT = 8192  # where a longer one would be slow, and for benchmarks
_LARGE_CONTEXT = 131072
_LEAST_CONTEXT = 512  # below this the default does not go to make a model fit
_STATE_PART = 4  # of what memory is left, the part that saved states may take,
_STATE_BYTES = 4 << 30  # but no more than this,
_UNKNOWN_STATE_BYTES = 1 << 30  # and this where nobody knows what is left
_STATE_PLACES = 256  # more are looked through in vain


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on the GPU: weights, with the adapters beside them, KV cache, and everything else
    (activations, states of layers, tables, staging, and what quantising needs while it lasts)."""

    weights: int
    kv_cache: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.other


def kv_bytes_per_position(model: Decoder, dtype: str, *, windows: bool | None = None) -> int:
    """Bytes of keys and values of one position: of all layers, or only of those with a window, or
    of those without one."""
    shapes = zip(model.config.kv_shapes, model.config.kv_windows, strict=True)
    own = (shape for shape, window in shapes if windows in (None, window > 0))
    return sum(kv_cache_bytes(shape, PAGE, dtype) for shape in own) // PAGE


def window_bytes(model: Decoder, options: EngineOptions, *, first: bool = False) -> int:
    """Bytes of keys and values of layers with a window, at most, if they have pages of their own;
    otherwise 0. first: those that the cache begins with."""
    pages = window_pages(model.config, options)
    pages = min(pages, options.first_pages) if first else pages
    return pages * PAGE * kv_bytes_per_position(model, options.kv_dtype, windows=True)


def cache_positions(
    nbytes: int, model: Decoder, draft: Decoder | None, options: EngineOptions
) -> int:
    """Returns how many positions, of all answers together, a KV cache of so many bytes holds, at
    least 1. options: with any `cache_positions`."""
    dtype = options.kv_dtype
    others = 0 if draft is None else kv_bytes_per_position(draft, dtype)
    shared = max(1, nbytes // (kv_bytes_per_position(model, dtype) + others))
    if not window_of(model.config):
        return shared

    def needed(pages: int) -> int:
        """Bytes of a cache of so many pages."""
        positions = pages * PAGE
        own = replace(options, context=min(options.context, positions), cache_positions=positions)
        of_windows = window_bytes(model, own)
        each = kv_bytes_per_position(model, dtype, windows=False if of_windows else None)
        return of_windows + (each + others) * positions

    each = kv_bytes_per_position(model, dtype, windows=False) + others
    most = nbytes // each if each else useful_positions(model.config, options)
    return max(shared, PAGE * bisect_right(range(1, most // PAGE + 1), nbytes, key=needed))


@dataclass(frozen=True)
class _Growing:
    """A buffer that grows with the context: what it holds, how many pages, and a page's bytes.
    besides: the pages that it has beside those of one context. shared: by all answers."""

    what: str
    pages: int
    page_bytes: int
    besides: int
    shared: bool

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    def too_large(self, options: EngineOptions, gpu: AdapterInfo, binding: int) -> OutOfMemoryError:
        """The error where this buffer is larger than one binding of the GPU, in bytes."""
        needed = (
            f"{self.nbytes:,} bytes of {self.what}; one binding of {gpu.name} holds {binding:,}"
        )
        pages = binding // self.page_bytes
        if not self.shared:
            return OutOfMemoryError(
                f"A context of {options.context:,} positions needs {needed}. Ask for a context of "
                f"at most {max(0, pages - self.besides) * PAGE:,} positions (`context`)."
            )
        return OutOfMemoryError(
            f"A KV cache of {self.pages * PAGE:,} positions in total, for {options.max_batch} "
            f"answers at once, each with a context of up to {options.context:,} positions, needs "
            f"{needed}, which is {pages * PAGE:,} positions in total. Ask for fewer answers at "
            "once, a smaller `context` or less memory for the cache."
        )


def _largest(model: Decoder, options: EngineOptions, whose: str = "") -> _Growing:
    """The largest buffer that grows with the context. whose: says that it is a draft model's, whose
    layers share one pool of pages."""
    c = model.config
    windows = 0 if whose else window_pages(c, options)
    keys = narrow = 0  # of a page of the layers without and with own pages for a window
    for shape, window in zip(c.kv_shapes, c.kv_windows, strict=True):
        nbytes = keys_bytes(shape, PAGE, options.kv_dtype)
        if window and windows:
            narrow = max(narrow, nbytes)
        else:
            keys = max(keys, nbytes)
    table = max(table_bytes(rope, PAGE) for rope in (c.rope, c.local_rope) if rope is not None)
    own = -(-options.context // PAGE)
    shared = options.max_batch > 1 or options.cache_positions is not None
    found = (
        _Growing(f"keys in each layer{whose}", options.pages, keys, options.pages - own, shared),
        _Growing("keys in each layer with a window", windows, narrow, 0, shared=True),
        _Growing(f"rotary positions{whose}", own, table, 0, shared=False),
    )
    return max(found, key=lambda growing: growing.nbytes)


def default_context(model: Decoder, gpu: AdapterInfo | None) -> int:
    """Returns the positions when nobody asks for a number: the model's own up to 131,072; up to
    8,192 on a CPU, and without subgroups, where steps need room for all scores."""
    fast = gpu is not None and gpu.kind != "software" and "subgroups" in gpu.features
    return min(model.config.max_position_embeddings, _LARGE_CONTEXT if fast else DEFAULT_CONTEXT)


@dataclass(frozen=True)
class Draft:
    """A draft model before there is a device."""

    name: str
    model: Decoder
    plan: LoadPlan

    def load(self, device: Device, progress: Progress) -> Loaded:
        """Returns the draft model with its weights on the device. progress: as for `load`."""
        return Loaded(
            self.model, load_weights(device, self.plan, progress=partial(progress, "weights"))
        )


def checked_context(
    model: Decoder,
    name: str,
    context: int | None,
    gpu: AdapterInfo | None,
    draft: Draft | None = None,
    most: int | None = None,
) -> int:
    """The positions asked for, or the default, at most `most`. Raises RequestError for what the
    model `name` has no positions for, and what `check_draft` raises."""
    if context is None:
        context = min(default_context(model, gpu), most or _LARGE_CONTEXT)
        if draft is not None:
            context = min(context, draft.model.config.max_position_embeddings)
    if draft is not None:
        check_draft(draft.model, draft.name, model, name, context)
    if not isinstance(context, int) or context < 2:
        raise RequestError(f"`context` must be a count of at least 2 positions, not {context!r}.")
    own = model.config.max_position_embeddings
    if context > own and model.config.rope.kind != "dynamic":
        raise RequestError(
            f"A context of {context} was asked for; {name} has positions up to {own}."
        )
    return context


class MemoryCount:
    """Counts the bytes that loading a model allocates, on a device that allocates nothing: the
    weights once, and an engine for each of the options that are asked about."""

    def __init__(
        self,
        model: Decoder,
        plan: LoadPlan,
        limits: Limits,
        gpu: AdapterInfo | None = None,
        loras: Loras = NO_LORAS,
        draft: Draft | None = None,
    ) -> None:
        self.model, self.plan, self.limits, self.gpu = model, plan, limits, gpu
        self.draft = draft
        self._device = DryDevice(limits, gpu)
        self._weights = {weight.name: weight.allocate(self._device) for weight in plan.weights}
        self._beside = loras.allocate(self._device, self._weights)
        self._draft: Loaded | None = None
        planned = plan.weights
        if draft is not None:
            weights = {weight.name: weight.allocate(self._device) for weight in draft.plan.weights}
            self._draft = Loaded(draft.model, weights)
            planned += draft.plan.weights
        self._weight_bytes = self._device.allocated
        quantized = [weight.shape for weight in planned if weight.quantized]
        if quantized:
            self._device.buffer(buffer_bytes(quantized, limits))
        self._without_engine = self._device.allocated
        self._needed: dict[EngineOptions, MemoryNeed] = {}
        self._state_bytes = 0  # of the states of one sequence

    def needed(self, options: EngineOptions) -> MemoryNeed:
        """Returns the bytes that loading with these options would allocate."""
        if options not in self._needed:
            self._device.allocated = self._without_engine
            own = Loaded(self.model, self._weights, self._beside)
            saved = Engine(self._device, own, options, self._draft).runner.caches.saved
            self._state_bytes = 0 if saved is None else saved.nbytes
            other = self._device.allocated - self._weight_bytes
            other -= self._kv_bytes(options, first=True)
            other += self._rope_bytes(options)
            cache = self._kv_bytes(options)
            self._needed[options] = MemoryNeed(self._weight_bytes, cache, other)
        return self._needed[options]

    @property
    def _models(self) -> list[Decoder]:
        return [self.model, *([] if self.draft is None else [self.draft.model])]

    def _kv_bytes(self, options: EngineOptions, *, first: bool = False) -> int:
        """Bytes of the cache, the draft model's included: at most, or those that it begins with."""
        each = sum(kv_bytes_per_position(model, options.kv_dtype) for model in self._models)
        of_windows = window_bytes(self.model, options, first=first)
        if of_windows:
            each -= kv_bytes_per_position(self.model, options.kv_dtype, windows=True)
        pages = options.first_pages if first else options.pages
        return of_windows + each * PAGE * pages

    def _rope_bytes(self, options: EngineOptions) -> int:
        """Bytes by which the rotary tables grow with the cache."""
        first = min(options.context, options.first_pages * PAGE)
        return sum(
            table_bytes(rope, options.context) - table_bytes(rope, first)
            for model in self._models
            for rope in (model.config.rope, model.config.local_rope)
            if rope is not None
        )

    def _with_all_positions(self, options: EngineOptions) -> EngineOptions:
        """The options with all positions that are of use, where these take no memory besides that
        of windows."""
        config, given = self.model.config, options.cache_positions is not None
        if given or self.draft is not None or not all_have_windows(config):
            return options
        if not window_pages(config, options):
            return options
        return replace(options, cache_positions=useful_positions(config, options))

    def _with_state_places(self, options: EngineOptions, left: int | None) -> EngineOptions:
        """The options with the places for states that the memory left has room for, in bytes; None:
        nobody knows. There are at least two for each sequence."""
        if not self._state_bytes or options.state_places is not None:
            return options
        spare = _UNKNOWN_STATE_BYTES if left is None else min(_STATE_BYTES, left // _STATE_PART)
        places = min(_STATE_PLACES, spare // self._state_bytes)
        return replace(options, state_places=max(options.most_state_places, places))

    def fitting(self, options: EngineOptions, *, may_shrink: Sequence[str] = ()) -> EngineOptions:
        """The options, with a smaller "max_batch" or "context" if that is needed and allowed: first
        the context goes down to 8,192. Where layers have states, as many are saved as a part of the
        memory that is left has room for.

        Raises OutOfMemoryError with the bytes needed, before anything is allocated or read.
        """
        gpu = self.gpu
        assert gpu is not None
        free = memory_info(gpu).free
        binding = min(self.limits.max_binding, self.limits.max_buffer)
        while True:
            largest = _largest(self.model, options)
            if self.draft is not None:
                drafting = _largest(self.draft.model, options, " of the draft model")
                largest = max(largest, drafting, key=lambda growing: growing.nbytes)
            fits_binding = largest.nbytes <= binding
            # To build no engine in vain.
            least = self._weight_bytes + self._kv_bytes(options)
            fewer = "max_batch" in may_shrink and options.max_batch > 1
            if fits_binding and (free is None or least <= free):
                # Steps of many rows may be too large for one binding.
                with suppress(OutOfMemoryError) if fewer else nullcontext():
                    need = self.needed(options)
                    if free is None or need.total <= free:
                        left = None if free is None else free - need.total
                        return self._with_state_places(self._with_all_positions(options), left)
            shorter = "context" in may_shrink and options.context // 2 >= _LEAST_CONTEXT
            if shorter and (options.context > DEFAULT_CONTEXT or not fewer):
                options = replace(options, context=options.context // 2)
            elif fewer:
                options = replace(options, max_batch=1)
            else:
                break
        if not fits_binding:
            raise largest.too_large(options, gpu, binding)
        need = self.needed(options)
        positions = f"{options.context:,} positions"
        if options.max_batch > 1:
            positions = (
                f"{options.pages * PAGE:,} positions of {options.max_batch} answers in total"
            )
        of_draft = "" if self.draft is None else ", the draft model's included"
        quantized = any(weight.stored.dtype in QUANTIZED for weight in self.plan.weights)
        raise OutOfMemoryError(
            f"The model needs {need.total:,} bytes ({need.weights:,} of weights, "
            f"{need.kv_cache:,} of KV cache for {positions}, {need.other:,} "
            f"for all else{of_draft}); {gpu.name} has {free:,} free. A smaller `context`, "
            f"{'' if quantized else 'quantised weights (`quantize`), '}a smaller "
            "model or another `device` would help."
        )
