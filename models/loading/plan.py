"""The plan of loading: which tensors make which weight, and how it lies on the GPU. Made once, of
headers alone; what counts memory, allocates and reads goes by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import ITEMSIZE, QUANTIZED, GpuTensor, allocate
from infer.models.loading.checkpoint import Checkpoint, listed
from infer.models.loading.formats.packed import Packed
from infer.models.loading.packing import WIDENED, Stored, stored_packed, stored_schemes
from infer.models.loading.shapes import Published
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import Source, View, WeightSpec, asked_for

# The dtype of embeddings and of the output projection in a model quantised to q4.
EMBEDDING_DTYPE = "q8"
_EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "embed_positions", "lm_head")
_ROUTER = ".router"


@dataclass(frozen=True, eq=False)
class Part:
    """A source as a checkpoint has it: the tensor, and the view of that."""

    source: Source
    tensor: TensorInfo | Packed
    view: View

    @property
    def dtype(self) -> str:
        """The dtype of its values; f32 where they are quantised."""
        return "f32" if isinstance(self.tensor, Packed) else self.tensor.dtype

    @property
    def width(self) -> int:
        """Values of the tensor from a row to the next."""
        return 1 if self.view.columns is None else self.tensor.shape[-1]

    def rows(self, own: range) -> Part:
        return replace(self, view=self.view.take_rows(own))

    def columns(self, own: range) -> Part:
        return replace(self, view=self.view.take_columns(own))


@dataclass(frozen=True, eq=False)
class PlannedWeight:
    """A weight of this shape as it will lie on the GPU. parts: what it is made of, one below the
    other; none of a weight that is random, or of ones."""

    spec: WeightSpec
    shape: tuple[int, ...]
    stored: Stored
    parts: tuple[Part, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def quantized(self) -> bool:
        """Whether this weight is quantised while it is loaded."""
        return self.stored.dtype in QUANTIZED and not self.stored.packed

    def allocate(self, device: Device) -> GpuTensor:
        """Zero-filled. Raises OutOfMemoryError and UnsupportedError."""
        how, unit = self.stored, self.spec.unit
        return allocate(device, self.shape, how.dtype, self.name, how.grouping, how.order, unit)


@dataclass(frozen=True)
class Summary:
    """The number and the types of a model's weights. parameters: their number, where weights that
    two layers share count once. format: the files' format, "gguf" or "safetensors". type: the type
    that most parameters have, such as "BF16", "Q4_K", "GPTQ", or "Q4" where they are
    quantised while they are loaded."""

    parameters: int
    format: str
    type: str


@dataclass(frozen=True)
class LoadPlan:
    """The weights of a model, in their order. part_of, format: as of Checkpoint."""

    weights: tuple[PlannedWeight, ...]
    part_of: str | None = None
    format: str | None = None

    @property
    def summary(self) -> Summary:
        types = Counter[str]()
        for weight in self.weights:
            if weight.parts:
                types[self._type(weight)] += prod(weight.shape)
        most = max(types, key=types.__getitem__, default="")
        files = "gguf" if self.format == "gguf" else "safetensors"
        return Summary(types.total(), files, most.upper())

    def _type(self, weight: PlannedWeight) -> str:
        tensor = weight.parts[0].tensor
        if not isinstance(tensor, Packed):
            return weight.stored.dtype
        return tensor.tensors[0].dtype if self.format == "gguf" else self.format or ""

    def joined(self, apart: Container[str] = ()) -> LoadPlan:
        """Returns the plan with the expert that all tokens share as the last expert of its layer's
        stack, or as several experts where it is as wide as these: if none has biases, it is not
        among those named `apart`, and lies on the GPU as the others do, so that nothing is widened
        for that."""
        found, end = {weight.name: weight for weight in self.weights}, "shared_expert.down_proj"
        for layer in [name.removesuffix(end) for name in found if name.endswith(f".{end}")]:
            names = [name for name in found if name.startswith(f"{layer}shared_expert.")]
            theirs = {name for name in found if name.startswith(f"{layer}experts.")}
            of_stacks = {n.replace(".shared_expert.", ".experts."): found[n] for n in names}
            biases = any(len(found[name].shape) == 1 for name in (*names, *theirs))
            width, inner = (found[f"{layer}{own}"].shape[1] for own in (end, "experts.down_proj"))
            if of_stacks.keys() != theirs or biases or width % inner:
                continue
            stacks = {
                name: _stacked(found[name], _as_experts(shared, width, inner), width // inner)
                for name, shared in of_stacks.items()
                if shared.name not in apart
            }
            whole = {name: weight for name, weight in stacks.items() if weight is not None}
            if len(whole) == len(names):
                found |= whole
                for name in names:
                    del found[name]
        return replace(self, weights=tuple(found.values()))


def _as_experts(shared: PlannedWeight, width: int, inner: int) -> PlannedWeight:
    """A weight of an MLP of that width as those of several that are `inner` wide, which add up to
    it, one below the other."""
    if width == inner:
        return shared
    starts = range(0, width, inner)
    if shared.name.endswith(".down_proj"):
        cut = [part.columns(range(i, i + inner)) for i in starts for part in shared.parts]
        shape = len(starts) * shared.shape[0], inner
        return replace(shared, shape=shape, parts=tuple(cut))
    tops = [(part, top) for part in shared.parts for top in range(0, part.view.shape[0], width)]
    # Rows of the gate and of up, whether or not they are one tensor.
    cut = [part.rows(range(top + i, top + i + inner)) for i in starts for part, top in tops]
    return replace(shared, parts=tuple(cut))


def _stacked(stack: PlannedWeight, last: PlannedWeight, experts: int) -> PlannedWeight | None:
    """A weight of experts with so many more below; None where these do not lie as the others."""
    parts = stack.parts + last.parts
    how = stored(stack.spec, parts) if parts and stack.stored.packed else stack.stored
    hows = (stack.stored, last.stored, how)
    alike = len({(each.dtype, each.grouping, each.packed) for each in hows}) == 1
    fits = last.shape == (experts * stack.spec.unit, stack.shape[1])
    if not (alike and fits) or WIDENED in hows:
        return None
    shape = stack.shape[0] + last.shape[0], stack.shape[1]
    return replace(stack, shape=shape, stored=how, parts=parts)


# From a checkpoint


def plan_weights(
    specs: Iterable[WeightSpec],
    checkpoint: Checkpoint,
    dtype: str | None = None,
    ignorable: Callable[[str], bool] = lambda name: False,
) -> LoadPlan:
    """The plan for a checkpoint that holds the weights, and nothing else but what is `ignorable`.
    Vectors become f32. Matrices keep their dtype (see `stored`) unless `dtype` gives another.

    Raises CheckpointError for tensors that are missing, surplus or of another shape, and
    UnsupportedError for a dtype that is not implemented, and for a conversion of what is quantised
    already."""
    if dtype is not None:
        _check_dtype(dtype)
    tensors, packed = checkpoint.tensors, checkpoint.packed
    wanted = asked_for(specs, lambda key: key in tensors or key in packed)
    found = [(spec, _found(spec, checkpoint)) for spec in wanted]
    _check(checkpoint, [source for _, sources in found for source in sources], ignorable)
    if packed and dtype is not None:
        raise UnsupportedError(
            f"{checkpoint.folder} is quantised already ({checkpoint.format}): its weights are not "
            f"converted to {dtype}. Leave out `dtype` and `quantize`."
        )
    weights = []
    for spec, sources in found:
        added = 0.0 if checkpoint.whole_norms else spec.added
        parts = tuple(_part(source, checkpoint, added) for source in sources)
        weights.append(PlannedWeight(spec, spec.shape, stored(spec, parts, dtype), parts))
    return LoadPlan(tuple(weights), checkpoint.part_of, checkpoint.format)


def _found(spec: WeightSpec, checkpoint: Checkpoint) -> tuple[Source, ...]:
    """Returns the sources that the checkpoint has, transposed only where it has them so."""
    known = checkpoint.tensors, checkpoint.packed
    has_others = any(source.key in those for source in spec.others for those in known)
    sources = spec.others if has_others else spec.sources
    return tuple(
        replace(source, transposed=False)
        if source.transposed and _upright(source, checkpoint)
        else source
        for source in sources
    )


def _upright(source: Source, checkpoint: Checkpoint) -> bool:
    """Whether a stack is not transposed in the files. Some files have it transposed, others not."""
    info, shape = checkpoint.tensors.get(source.key), source.shape
    stack = len(shape) > 2 and info is not None and info.shape == shape != source.file_shape
    return checkpoint.upright or stack or source.key in checkpoint.packed


def _part(source: Source, checkpoint: Checkpoint, added: float) -> Part:
    tensor: TensorInfo | Packed
    tensor = checkpoint.packed.get(source.key) or checkpoint.tensors[source.key]
    view = replace(source.view, added=added)
    if source.transposed:
        *_, height, width = source.shape
        matrix = view.rows.start // height
        assert view.rows[-1] // height == matrix  # they are all of one
        view = replace(
            view,
            rows=_moved(view.across, matrix * width),
            columns=_moved(view.rows, -matrix * height),
            transposed=not view.transposed,
        )
    return Part(source, tensor, view)


def _moved(own: range, by: int) -> range:
    return range(own.start + by, own.stop + by, own.step)


def _check(
    checkpoint: Checkpoint, sources: Sequence[Source], ignorable: Callable[[str], bool]
) -> None:
    found, folder = checkpoint.tensors, checkpoint.folder
    wanted = {s.key: s.file_shape for s in sources if s.key not in checkpoint.packed}
    missing = [key for key in wanted if key not in found]
    if missing:
        raise CheckpointError(
            f"{folder} lacks tensors that config.json asks for: {listed(missing)}. Download the "
            "model again, or give the folder of a complete one."
        )
    misshapen = [
        f"{key} is {found[key].shape}, not {shape}"
        for key, shape in wanted.items()
        if found[key].shape != shape
    ]
    if misshapen:
        raise CheckpointError(
            f"{folder} has tensors of other shapes than config.json asks for: {listed(misshapen)}. "
            "Its files are of different models: download all of them again."
        )
    foreign = [f"{key} ({found[key].dtype})" for key in wanted if found[key].dtype not in ITEMSIZE]
    if foreign:
        raise UnsupportedError(
            f"{folder} has tensors of dtypes that are not implemented: {listed(foreign)}. Take a "
            f"version of the model in {listed(ITEMSIZE)}."
        )
    surplus = [name for name in found if name not in wanted and not ignorable(name)]
    if surplus:
        raise CheckpointError(
            f"{folder} has tensors that the model has no use for: {listed(surplus)}. Without them "
            "it would not be the model it was trained as: check model_type in config.json."
        )


def stored(spec: WeightSpec, parts: Sequence[Part], dtype: str | None = None) -> Stored:
    """How a weight lies on the GPU: f32 for a vector, else in `converted_dtype`, else as its parts
    are. Parts of different dtypes are widened to f32, which holds each of them exactly; so are
    quantised ones beside others that are not, or that have no form in common with them, those of a
    router, those that are transposed, and columns that are no whole groups.

    Raises UnsupportedError for kinds and groups that have no kernel.
    """
    packed = [(part.tensor, part.view) for part in parts if isinstance(part.tensor, Packed)]
    if packed:
        whole = all(
            len(view.across) == matrix.shape[1] or matrix.divides(len(view.across))
            for matrix, view in packed
        )
        transposed = any(view.transposed for _, view in packed)
        if len(packed) < len(parts) or spec.name.endswith(_ROUTER) or transposed or not whole:
            return WIDENED
        how = stored_packed([matrix for matrix, _ in packed], spec.name)
        return WIDENED if spec.heads and how.order is not None else how
    if dtype is not None or len(spec.shape) == 1:
        return Stored(converted_dtype(spec, dtype or "f32"))
    dtypes = {part.tensor.dtype for part in parts if isinstance(part.tensor, TensorInfo)}
    return Stored(dtypes.pop() if len(dtypes) == 1 else "f32")


def converted_dtype(spec: WeightSpec, dtype: str) -> str:
    """The dtype of a weight in a model that is converted to `dtype`. Routers are not quantised:
    they are small, and what they choose must not change. Nor are the gates of a state, where an
    error would grow with every position."""
    exact = spec.name.endswith((_ROUTER, ".gates")) and dtype in QUANTIZED
    if len(spec.shape) == 1 or exact:
        return "f32"
    return EMBEDDING_DTYPE if dtype == "q4" and spec.name in _EMBEDDINGS else dtype


def _check_dtype(dtype: str) -> None:
    if dtype not in (*ITEMSIZE, *QUANTIZED):
        raise UnsupportedError(
            f"Weights cannot be stored as {dtype!r}. Use {listed((*ITEMSIZE, *QUANTIZED))}."
        )


# Without one


def plan_random(
    specs: Iterable[WeightSpec], dtype: str, published: Published | None = None
) -> LoadPlan:
    """The plan for random weights: matrices of `dtype`, or packed as in checkpoints that are
    `published` so. Raises UnsupportedError."""
    _check_dtype(dtype)
    return LoadPlan(
        tuple(PlannedWeight(s, s.shape, _stored_random(s, dtype, published)) for s in specs)
    )


def _stored_random(spec: WeightSpec, dtype: str, published: Published | None) -> Stored:
    if published is None or len(spec.shape) == 1:
        return Stored(converted_dtype(spec, dtype))
    others = published.embeddings
    if spec.name.endswith(_ROUTER):  # `stored` widens them where they are packed
        return Stored(others or "f32")
    if others is not None and (spec.name in _EMBEDDINGS or published.part not in spec.name):
        return Stored(others)
    return stored_schemes([published.scheme], spec.shape[1], spec.name)
