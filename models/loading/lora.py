"""LoRA adapters (Hu et al. 2021) as PEFT writes them: adapter_config.json and
adapter_model.safetensors.

A weight W [out, in] becomes W + scale B A, of the tensors

    base_model.model.NAME.lora_A.weight  [rank, in]    f32, f16 or bf16
    base_model.model.NAME.lora_B.weight  [out, rank]

where the model's own tensor is NAME.weight, and scale = alpha / rank, or, with use_rslora,
alpha / sqrt(rank) (Kalajdzievski 2023). alpha is lora_alpha, or what alpha_pattern has for NAME.
Beside the changes of a head PEFT saves the model's own, as NAME.base_layer.weight: it must be that.

An adapter is merged into a weight while that is read, or lies beside it as two matrices (LowRank):
beside what the files have quantised already, and wherever it is chosen call by call. Then those of
all adapters are one stack, in which zeros fill lower ranks, and stand for what one does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.pack import from_bf16, to_bf16, write
from infer.kernels.gpu.row_scales import scale_rows
from infer.kernels.gpu.tensor import ITEMSIZE, GpuTensor, allocate
from infer.kernels.ops.linear import Changes, LowRank
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.multimodal import text_tensors
from infer.models.loading.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    listed,
    read_header,
)
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.formats.packed import Packed, read_rows
from infer.models.loading.load import Change, Factors, widened
from infer.models.loading.plan import LoadPlan, Part, PlannedWeight
from infer.models.loading.tensors import TensorInfo

# Keys that say nothing about what is computed from the tensors. Any other key must be empty.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",  # how the base's weight lies, of which its file says more
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}

# Where B A starts at zero; the other ways (pissa, olora, loftq, …) change the model's own weights.
_INITIAL = (True, False, "gaussian", "eva", "mica", "orthogonal")

_MERGE = (
    "Merge it into the model with PEFT's merge_and_unload, and load the folder that "
    "save_pretrained then writes."
)

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Tensors that PEFT copies from the model, unless its save_embedding_layers is false.
_COPY = re.compile(
    r"base_model\.model\.((?:.+\.)?(?:embed_tokens|embed_in|lm_head|embed_out))(?:\.base_layer)?\.weight"
)
_HEADS = ("lm_head.weight", "embed_out.weight")
_AT_ONCE = 1 << 22  # values compared at a time
_MOST_ALPHA = 1e6  # far more than anybody trains with, and no product leaves f32
# Parts of a pattern that make it take for ever.
_REPETITION, _REPEATED_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class Pair:
    """A low-rank change of a tensor [rows, columns], to which it adds scale * b a; a [rank,
    columns], b [rows, rank]."""

    a: TensorInfo
    b: TensorInfo
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the tensors that it fits."""
        return self.b.shape[0], self.a.shape[1]

    def factors(self, first: int, count: int) -> Factors:
        """scale * b and a, for rows [first, first + count). Raises CheckpointError for values that
        are not finite."""
        return np.float32(self.scale) * _rows(self.b, first, count), _rows(self.a, 0, self.rank)


def _rows(info: TensorInfo, first: int, count: int) -> NDArray[np.float32]:
    """Rows of a matrix in f32."""
    columns, width = info.shape[1], ITEMSIZE[info.dtype]
    raw = np.empty((count, columns), np.uint16 if info.dtype == "bf16" else f"f{width}")
    info.read_into(raw.data.cast("B"), first * columns * width)
    values = widened(raw, info.dtype)
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{info.file}: {info.name} has values that are not finite: the adapter is damaged. "
            "Download it again."
        )
    return values


@dataclass(frozen=True)
class Copy:
    """A copy of the model's own tensor among those of an adapter; name: of that."""

    name: str
    copy: TensorInfo
    own: TensorInfo

    def check(self) -> None:
        """Raises UnsupportedError where it has not the model's values, in its own dtype."""
        rows, columns = self.own.shape
        step = max(1, _AT_ONCE // columns)
        for first in range(0, rows, step):
            part = first, min(first + step, rows)
            own = _rounded(read_rows(self.own, *part), self.copy.dtype)
            if not np.array_equal(read_rows(self.copy, *part), own):
                raise _retrained(self.name, self.copy, "has other values than the model's own")


def _rounded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    with np.errstate(over="ignore"):
        return values.astype(f"f{ITEMSIZE[dtype]}")


def _retrained(name: str, copy: TensorInfo, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} brings {copy.name}, which {why}: embeddings that an adapter replaces are not "
        f"implemented. {_MERGE}"
    )


@dataclass(frozen=True)
class Lora:
    """An adapter, of which the headers are read. name: for people. base: what it was made for, as
    its config calls that. pairs: by the name of the tensor that they change. copies: of tensors of
    the model, by their names there."""

    name: str
    base: str
    pairs: Mapping[str, Pair]
    copies: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path, name: str) -> Lora:
        """The adapter in a folder. Raises UnsupportedError for a kind that is not implemented, and
        CheckpointError for files that are damaged or contradict each other."""
        config = RawConfig.open(folder, ADAPTER_CONFIG)
        config.expect("peft_type", "LORA")
        for key, accepted in (("bias", ("none",)), ("init_lora_weights", _INITIAL)):
            if config.get(key, accepted[0]) not in accepted:
                raise _unmerged(config, key)
        rank, alpha = config.size("r"), config.get("lora_alpha", kind=float)
        patterns = config.get("alpha_pattern", {}, dict)
        ranks = [rank, *config.get("rank_pattern", {}, dict).values()]
        root = config.get("use_rslora", False, bool)
        base = config.get("base_model_name_or_path", None, str) or "a model that it does not name"
        for key, value in config.values.items():
            if key not in config.read | _HARMLESS and value:
                raise _unmerged(config, key)
        tensors = read_header(folder / ADAPTER_TENSORS)
        copied = {key: _COPY.fullmatch(key) for key, i in tensors.items() if i.dtype in ITEMSIZE}
        copies = {f"{match[1]}.weight": tensors[key] for key, match in copied.items() if match}
        found = _matrices({k: i for k, i in tensors.items() if not copied.get(k)}, name)
        pairs = {}
        for module, (a, b) in found.items():
            if a.shape[0] != b.shape[1] or a.shape[0] not in ranks:
                raise CheckpointError(
                    f"{name}: {a.name} is {a.shape} and {b.name} {b.shape}, which does not fit "
                    f"r = {rank} in {ADAPTER_CONFIG}. Download the adapter again."
                )
            own = _alpha(patterns, module, alpha, config.place)
            if not abs(own) < _MOST_ALPHA:  # nor if it is not a number
                raise UnsupportedError(f"{config.place}: the alpha of {module} is {own}.")
            divisor = math.sqrt(a.shape[0]) if root else a.shape[0]
            pairs[f"{module}.weight"] = Pair(a, b, own / divisor)
        return cls(name, base, pairs, copies)

    def targets(self, model: Decoder, plan: LoadPlan) -> dict[str, dict[str, Pair]]:
        """The pairs by weight of the model and by source of that. What changes a head that is tied
        is found under "embed_tokens"; what changes parts that are not run is left out. Raises
        CheckpointError for an adapter of another model."""
        places = _places(model, plan)
        all_pairs = self.pairs if plan.part_of is None else text_tensors(self.pairs)
        if not all_pairs:
            raise self._misfit(f"it changes nothing of the text model in {plan.part_of}")
        foreign = [key for key in all_pairs if key not in places]
        if foreign:
            raise self._misfit(f"it changes {listed(foreign)}, which this model does not have")
        found: dict[str, dict[str, Pair]] = {}
        for key, pair in all_pairs.items():
            for weight, part in places[key]:
                name, source = weight.name, part.source
                other = name == "embed_tokens" or ".experts." in name or weight.spec.heads
                if other and key not in _HEADS:
                    raise UnsupportedError(
                        f"{self.name} changes {key}: adapters of embeddings, of experts and of "
                        f"what makes keys and values of latents are not implemented. {_MERGE}"
                    )
                if pair.shape != source.shape or pair.rank > max(pair.shape):
                    raise self._misfit(
                        f"{pair.a.name} is {pair.a.shape} and {pair.b.name} {pair.b.shape}, and "
                        f"{key} is {source.shape}"
                    )
                found.setdefault(name, {})[source.key] = pair
        return found

    def copied(self, model: Decoder, plan: LoadPlan) -> list[Copy]:
        """The copies with what they should be copies of. Raises UnsupportedError where they cannot
        be that."""
        places, found = _places(model, plan), []
        copies = self.copies if plan.part_of is None else text_tensors(self.copies)
        for key, copy in copies.items():
            own = places[key][0][1].tensor if key in places else None
            if not isinstance(own, TensorInfo):
                raise UnsupportedError(
                    f"{self.name} brings {copy.name}, and the model's own is quantised, or not "
                    "there, so that they cannot be compared. If it was not trained, leave it out: "
                    "PEFT's save_pretrained(..., save_embedding_layers=False)."
                )
            if copy.shape != own.shape:
                raise _retrained(
                    self.name, copy, f"is {copy.shape} where the model's is {own.shape}"
                )
            found.append(Copy(self.name, copy, own))
        return found

    def _misfit(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"The adapter {self.name} is for another model: {why}. It was made for {self.base}."
        )


def _places(model: Decoder, plan: LoadPlan) -> dict[str, list[tuple[PlannedWeight, Part]]]:
    """The matrices of a model that are made of a tensor, by its name, or what transformers calls it
    where the file has another, and the one of a head that is tied."""
    places: dict[str, list[tuple[PlannedWeight, Part]]] = {}
    for weight in plan.weights:
        parts = weight.parts if len(weight.shape) == 2 else ()
        sources = weight.spec.sources
        for i, part in enumerate(parts):
            key, alike = part.source.key, len(parts) == len(sources)
            for name in {key, sources[i].key} if alike else {key}:
                places.setdefault(name, []).append((weight, part))
            if weight.name == "embed_tokens" and model.config.tie_word_embeddings:
                places |= {head: [(weight, part)] for head in _HEADS if head not in places}
    return places


def _matrices(
    tensors: Mapping[str, TensorInfo], name: str
) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """A and B by the name of the module that they change."""
    halves: dict[str, dict[str, TensorInfo]] = {}
    others = []
    for key, info in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or info.dtype not in ITEMSIZE:
            others.append(f"{key} ({info.dtype})")
        else:
            halves.setdefault(match[1], {})[match[2]] = info
    if others:
        raise UnsupportedError(
            f"{name} has tensors that are not implemented: {listed(others)}. Only pairs of "
            f"lora_A.weight and lora_B.weight in f32, f16 or bf16 are. {_MERGE}"
        )
    single = [module for module, pair in halves.items() if len(pair) == 1]
    if single or not halves:
        raise CheckpointError(
            f"{name} has only one of lora_A and lora_B for {listed(single) or 'any module'}. "
            "Download the adapter again."
        )
    flat = [i.name for pair in halves.values() for i in pair.values() if len(i.shape) != 2]
    if flat:
        raise UnsupportedError(
            f"{name} has tensors that are not matrices: {listed(flat)}. {_MERGE}"
        )
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}


def _unmerged(config: RawConfig, key: str) -> UnsupportedError:
    """The error for a key whose value changes what is computed."""
    value = shown(config.values[key])
    return UnsupportedError(f"{config.place}: {key} = {value} is not implemented. {_MERGE}")


def _alpha(patterns: Mapping[str, Any], module: str, default: float, place: str) -> float:
    """Returns the alpha of the first pattern that matches a module's name, or its end."""
    for pattern, alpha in patterns.items():
        try:
            if len(_REPETITION.findall(pattern)) > 2 or _REPEATED_GROUP.search(pattern):
                raise ValueError("it repeats too much")
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(alpha)
        except (re.error, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UnsupportedError(
                f"{place}: alpha_pattern {shown(pattern)}: {shown(alpha)} is not implemented "
                f"({error})."
            ) from None
    return default


# On a model


@dataclass(frozen=True)
class _Beside:
    """The low-rank changes beside a weight: the pairs of its sources."""

    weight: PlannedWeight
    pairs: Mapping[str, Pair]

    @property
    def rank(self) -> int:
        return sum(pair.rank for pair in self.pairs.values())

    def fill(self, device: Device, change: LowRank, number: int = 0) -> None:
        """a: the pairs' one below the other; b: those of each source in the columns of its pair.
        number: which of a stack."""
        rows, columns = self.weight.shape
        a = np.zeros((change.rank, columns), np.float32)
        b = np.zeros((rows, change.rank), np.float32)
        left = 0
        for key, pair in self.pairs.items():
            own = slice(left, left + pair.rank)
            of_tensor, a[own] = pair.factors(0, pair.shape[0])
            top = 0
            for source in (part.source for part in self.weight.parts):
                part = source.view.rows
                bottom = top + len(part)
                if source.key == key:
                    b[top:bottom, own] = of_tensor[part.start : part.stop : part.step]
                top = bottom
            left = own.stop
        write(device, change.a, a, number * change.rank)
        write(device, change.b, b, number * rows)


def _allocate(device: Device, same: Sequence[_Beside], count: int | None = None) -> LowRank:
    """Zeros, as what lies beside one weight, of the largest of their ranks. count: of a stack."""
    (rows, columns), rank = same[0].weight.shape, max(each.rank for each in same)
    label, matrices = f"{same[0].weight.name} adapter", count or 1
    a = allocate(device, (matrices * rank, columns), "f32", label)
    b = allocate(device, (matrices * rows, rank), "f32", label)
    return LowRank(a, b, by_row=count is not None)


@dataclass(frozen=True)
class Adapters:
    """The low-rank changes beside the weights of a model. always: for all rows of a step. by_row:
    stacks of the changes by the adapters of these names: number 1 is the first, 0 a row without."""

    always: Changes
    by_row: Changes
    names: tuple[str, ...]

    @property
    def multiplied(self) -> list[GpuTensor]:
        """The matrices that rows of all adapters are multiplied by, as by the model's own."""
        return [matrix for change in self.always.values() for matrix in (change.a, change.b)]

    def number(self, name: str | None) -> int:
        """By which rows say that they have this one."""
        return 0 if name is None else 1 + self.names.index(name)


NO_ADAPTERS = Adapters({}, {}, ())


@dataclass(frozen=True)
class Loras:
    """The adapters of a model that is loaded. merged: what goes into its tensors. always: what lies
    beside its weights, by their names, of the adapter that is always on; named: the same by name of
    the adapter. copies: what must be the model's own. names: of all weights that are changed."""

    merged: Mapping[str, Change]
    always: Mapping[str, _Beside]
    named: Mapping[str, Mapping[str, _Beside]]
    copies: Sequence[Copy] = ()
    names: Container[str] = ()

    @classmethod
    def fit(
        cls,
        model: Decoder,
        plan: LoadPlan,
        *,
        always: Lora | None = None,
        named: Mapping[str, Lora] | None = None,
    ) -> Loras:
        """How they go with a model: either `always`, which is merged into what the files have as
        floats and lies beside what they have quantised, or those that are `named`. Raises
        CheckpointError for adapters of another model, and UnsupportedError."""
        weights = {weight.name: weight for weight in plan.weights}

        def beside(targets: Mapping[str, Mapping[str, Pair]]) -> dict[str, _Beside]:
            return {name: _Beside(weights[name], pairs) for name, pairs in targets.items()}

        merged: dict[str, Change] = {}
        kept = {}
        of_always = always.targets(model, plan) if always else {}
        for name, pairs in of_always.items():
            quantised = any(isinstance(part.tensor, Packed) for part in weights[name].parts)
            if quantised or name == "embed_tokens":
                kept[name] = pairs
            else:
                merged |= {key: pair.factors for key, pair in pairs.items()}
        found = {
            adapter: beside(lora.targets(model, plan)) for adapter, lora in (named or {}).items()
        }
        loras = [*([always] if always else []), *(named or {}).values()]
        copies = [copy for lora in loras for copy in lora.copied(model, plan)]
        names = {*of_always, *(name for of_weights in found.values() for name in of_weights)}
        return cls(merged, beside(kept), found, copies, names)

    def allocate(self, device: Device, weights: Mapping[str, GpuTensor]) -> Adapters:
        """Allocates the changes beside the weights, zero-filled."""
        stacks: dict[str, list[_Beside]] = {}
        for of_weights in self.named.values():
            for name, each in of_weights.items():
                stacks.setdefault(name, []).append(each)
        count = len(self.named)
        return Adapters(
            {weights[name]: _allocate(device, [each]) for name, each in self.always.items()},
            {weights[name]: _allocate(device, same, count) for name, same in stacks.items()},
            tuple(self.named),
        )

    def fill(self, device: Device, weights: Mapping[str, GpuTensor], adapters: Adapters) -> None:
        """Read it from the files. Raises CheckpointError, and UnsupportedError for copies of the
        model's tensors that are none."""
        for copy in self.copies:
            copy.check()
        for name, each in self.always.items():
            each.fill(device, adapters.always[weights[name]])
        for number, of_weights in enumerate(self.named.values()):
            for name, each in of_weights.items():
                each.fill(device, adapters.by_row[weights[name]], number)
        if device.matrices:
            scale_rows(device, adapters.multiplied)


NO_LORAS = Loras({}, {}, {})
