"""Describes a model without loading it: its sizes, the memory it needs and whether that fits."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infer.engine.options import EngineOptions
from infer.engine.windows import window_of
from infer.hub import CARD, resolve
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.adapters import AdapterInfo, choose_adapter, list_adapters, memory_info
from infer.kernels.gpu.device import Limits
from infer.keywords import Progress
from infer.loading import (
    check_draft_quantize,
    open_adapters,
    open_draft,
    open_predictor,
    way_to_speculate,
    weight_dtype,
)
from infer.memory import MemoryCount, checked_context, kv_bytes_per_position, window_bytes
from infer.models import open_model
from infer.models.loading.files import open_file
from infer.models.loading.formats.gguf import Gguf
from infer.models.loading.lora import Loras
from infer.models.loading.packing import WIDENED
from infer.models.loading.plan import plan_weights
from infer.progress import size
from infer.text.folder_tokenizer import open_tokenizer

_FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*\n", re.S)
_LICENSE = re.compile(r"^license(?:_name)?:[ \t]*[\"']?([\w.+-]+)", re.M)
_OWN_LAYER = "its own layer"  # that predicts further tokens


@dataclass(frozen=True)
class Inspection:
    """A model, and the memory that it needs at `context` positions; sizes in bytes.

    parameters: without those that are shared. dtypes: of the matrices on the GPU. widened: how many
    of these are f32 though the files have them quantised: routers, and those whose parts have no
    form in common. ignored: what the files quantise besides weights, in a way that is not used.
    notes: where the files contradict each other, and what is done then.
    license: its name on the hub, where the files have it. lora: the adapter that is always on.
    draft: the model that drafts for it, or that its own layer does; the weights, cache and other
    buffers of either are counted too. kv_bytes_per_token: of the KV cache; where layers with a
    window have pages of their own, of the other layers, kv_window_bytes of these pages, and
    kv_window how many positions these layers see; otherwise both are 0.
    disk_bytes: all tensors of the checkpoint. fits: whether the GPU has room now, None where that
    is unknown; `verdict` says why, with names as those of errors (`infer.kernels.errors`).
    """

    name: str
    path: str
    revision: str | None
    architecture: str
    part_of: str | None
    license: str | None
    parameters: int
    dtypes: list[str]
    widened: int
    format: str | None
    ignored: list[str]
    notes: list[str]
    lora: str | None
    draft: str | None
    disk_bytes: int
    max_context: int
    context: int
    kv_dtype: str
    kv_bytes_per_token: int
    kv_window: int
    kv_window_bytes: int
    weight_bytes: int
    kv_cache_bytes: int
    other_bytes: int
    total_bytes: int
    chat_template: bool
    tokenizer: bool
    adapter: AdapterInfo | None
    products: str | None
    fits: bool | None
    verdict: str


def inspect_model(
    model: str,
    *,
    device: str | int | None = None,
    webgpu: str | None = None,
    precision: str = "auto",
    context: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    kv_dtype: str = "f16",
    speculate: str | None = None,
    draft: str | Path | None = None,
    draft_quantize: str | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Returns what `infer.load` with these arguments would need. Reads no weights, opens no device,
    and works without one. progress: called during a download, as by `load`.

    Raises ModelError, DeviceError, TokenizerError, RequestError.
    """
    converted = weight_dtype(dtype, quantize)
    check_draft_quantize(draft_quantize, draft)
    fetched = partial(progress or (lambda *_: None), "download")
    found = resolve(model, revision=revision, offline=offline, progress=fetched)
    always, _ = open_adapters(adapter, None, offline, fetched)
    way = way_to_speculate(speculate, draft)
    opened, checkpoint = open_model(found.path, predicts=draft is None and way in ("mtp", "auto"))
    plan = plan_weights(opened.weights(), checkpoint, converted, opened.ignorable)
    loras = Loras.fit(opened, plan, always=always)
    has_tokenizer = found.path.is_file() or (found.path / "tokenizer.json").is_file()
    tokenizer = open_tokenizer(found.path) if has_tokenizer else None
    if draft is None:
        drafts = open_predictor(found.name, opened, checkpoint, converted, way)
    else:
        drafted = resolve(str(draft), offline=offline, progress=fetched)
        own = tokenizer or open_tokenizer(found.path)
        drafts = open_draft(drafted, converted, draft_quantize, found.name, own)
    given = device is not None or list_adapters(webgpu)
    gpu = choose_adapter(device, webgpu, precision) if given else None
    options = EngineOptions(
        checked_context(opened, found.name, context, gpu, drafts),
        kv_dtype=kv_dtype,
        speculate=way,
    )
    limits = Limits() if gpu is None else Limits.of(gpu.limits)
    count = MemoryCount(opened, plan.joined(loras.names), limits, gpu, loras, drafts)
    fits: bool | None = None
    if gpu is None:
        verdict = "no adapter was found; counted for the least that WebGPU guarantees"
    else:
        try:
            options = count.fitting(options, may_shrink=("context",) if context is None else ())
        except OutOfMemoryError as error:
            fits, verdict = False, error.marked
        else:
            free = memory_info(gpu).free
            fits = None if free is None else True
            verdict = (
                "the platform does not tell how much memory is free"
                if free is None
                else f"{size(free)} are free"
            )
    need = count.needed(options)
    of_windows = window_bytes(opened, options)
    drafts_by = None
    if drafts is not None:
        drafts_by = _OWN_LAYER if draft is None else drafts.name
    return Inspection(
        name=found.name,
        path=str(found.path),
        revision=found.revision,
        architecture=opened.config.model_type,
        part_of=checkpoint.part_of,
        license=_license(found.path),
        parameters=plan.summary.parameters,
        dtypes=sorted({w.stored.dtype for w in plan.weights if len(w.shape) > 1}),
        widened=[weight.stored for weight in plan.weights].count(WIDENED),
        format=checkpoint.format,
        ignored=list(checkpoint.ignored),
        notes=list(checkpoint.notes),
        lora=None if always is None else f"{always.name}, for {len(always.pairs)} tensors",
        draft=drafts_by,
        disk_bytes=checkpoint.nbytes,
        max_context=opened.config.max_position_embeddings,
        context=options.context,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=kv_bytes_per_position(
            opened, kv_dtype, windows=False if of_windows else None
        ),
        kv_window=window_of(opened.config) if of_windows else 0,
        kv_window_bytes=of_windows,
        weight_bytes=need.weights,
        kv_cache_bytes=need.kv_cache,
        other_bytes=need.other,
        total_bytes=need.total,
        chat_template=tokenizer is not None and tokenizer.has_chat_template,
        tokenizer=tokenizer is not None,
        adapter=gpu,
        products=None if gpu is None else gpu.products,
        fits=fits,
        verdict=verdict,
    )


def _license(path: Path) -> str | None:
    """Returns the license in a GGUF file, or in the model's card where that was fetched with it."""
    if path.is_file() and (named := Gguf.open(path).metadata.get("general.license")):
        return str(named)
    folder = path.parent if path.is_file() else path
    text = ""
    with suppress(OSError), open_file(folder / CARD) as file:
        text = file.read(1 << 16).decode(errors="replace")
    card = _FRONT_MATTER.match(text)
    names = _LICENSE.findall(card[1]) if card else []
    return next((name for name in names if name != "other"), None)
