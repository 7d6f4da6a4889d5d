"""How much memory a model takes, counted before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infer.engine import Engine, EngineOptions
from infer.kernels.errors import OutOfMemoryError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, memory_info
from infer.kernels.gpu.device import DryDevice, Limits
from infer.kernels.gpu.quantize import buffer_bytes
from infer.kernels.gpu.tensor import QUANTIZED
from infer.kernels.state.kv_cache import PAGE, keys_bytes, kv_cache_bytes
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.rope import table_bytes
from infer.models.loading.lora import NO_LORAS, Loras
from infer.models.loading.plan import LoadPlan

DEFAULT_CONTEXT = 8192
_LEAST_CONTEXT = 512  # below this the default does not go to make a model fit


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


def memory_needed(
    model: Decoder,
    plan: LoadPlan,
    options: EngineOptions,
    limits: Limits,
    adapter: AdapterInfo | None = None,
    loras: Loras = NO_LORAS,
) -> MemoryNeed:
    """What loading would allocate: the engine is built on a device that only counts."""
    device = DryDevice(limits, adapter)
    weights = {weight.name: weight.allocate(device) for weight in plan.weights}
    quantized = [weight.shape for weight in plan.weights if weight.quantized]
    beside = loras.allocate(device, weights)
    weight_bytes = device.allocated
    if quantized:
        device.buffer(buffer_bytes(quantized, limits))
    Engine(device, model, weights, options, beside)
    kv_bytes = kv_bytes_per_position(model, options.kv_dtype) * options.context
    return MemoryNeed(weight_bytes, kv_bytes, device.allocated - weight_bytes - kv_bytes)


def kv_bytes_per_position(model: Decoder, dtype: str) -> int:
    """Bytes of keys and values of one position."""
    return sum(kv_cache_bytes(shape, PAGE, dtype) for shape in model.config.kv_shapes) // PAGE


def _largest(model: Decoder, dtype: str) -> tuple[str, int]:
    """What the largest buffer that grows with the context is of, and its bytes for a page."""
    c = model.config
    keys = [keys_bytes(shape, PAGE, dtype) for shape in c.kv_shapes]
    tables = [table_bytes(rope, PAGE) for rope in (c.rope, c.local_rope) if rope is not None]
    found = {"keys in each layer": max(keys, default=0), "rotary positions": max(tables)}
    return max(found.items(), key=lambda entry: entry[1])


def default_context(model: Decoder) -> int:
    """Positions when nobody asks for a number."""
    return min(model.config.max_position_embeddings, DEFAULT_CONTEXT)


def checked_context(model: Decoder, name: str, context: int | None) -> int:
    """The positions asked for, or the default. Raises RequestError for what the model `name` has
    no positions for."""
    if context is None:
        return default_context(model)
    if not isinstance(context, int) or context < 2:
        raise RequestError(f"context must be a count of at least 2 positions, not {context!r}.")
    own = model.config.max_position_embeddings
    if context > own and model.config.rope.kind != "dynamic":
        raise RequestError(
            f"A context of {context} was asked for; {name} has positions up to {own}."
        )
    return context


def fitting_options(
    model: Decoder,
    plan: LoadPlan,
    options: EngineOptions,
    limits: Limits,
    adapter: AdapterInfo,
    *,
    may_shrink: bool,
    loras: Loras = NO_LORAS,
) -> EngineOptions:
    """The options, with a smaller context if that is needed and allowed.

    Raises OutOfMemoryError with the bytes needed, before anything is allocated or read.
    """
    free = memory_info(adapter).free
    what, of_page = _largest(model, options.kv_dtype)
    binding = min(limits.max_binding, limits.max_buffer)
    while True:
        need = memory_needed(model, plan, options, limits, adapter, loras)
        largest = -(-options.context // PAGE) * of_page
        fits_binding = largest <= binding
        if fits_binding and (free is None or need.total <= free):
            return options
        if not may_shrink or options.context // 2 < _LEAST_CONTEXT:
            break
        options = replace(options, context=options.context // 2)
    if not fits_binding:
        raise OutOfMemoryError(
            f"A context of {options.context} positions needs {largest:,} bytes of {what}; one "
            f"binding of {adapter.name} holds {binding:,}. "
            f"Ask for at most {binding // of_page * PAGE} (--context)."
        )
    quantized = any(weight.stored.dtype in QUANTIZED for weight in plan.weights)
    raise OutOfMemoryError(
        f"The model needs {need.total:,} bytes ({need.weights:,} of weights, {need.kv_cache:,} of "
        f"KV cache for {options.context} positions, {need.other:,} besides); {adapter.name} has "
        f"{free:,} free. A smaller context (--context), "
        f"{'' if quantized else 'quantised weights (--quantize), '}a smaller model or another "
        "device (--device) would help."
    )
