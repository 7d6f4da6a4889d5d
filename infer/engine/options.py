"""How an engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from infer.boundaries import shown
from infer.engine.speculation import MAX_DRAFT, WAYS
from infer.kernels.errors import RequestError
from infer.kernels.state.kv_cache import PAGE

MAX_BATCH = 64
AHEAD = 2  # steps in flight: one runs while the next is recorded
DRAFT_ROWS = 1 + MAX_DRAFT
_FIRST_POSITIONS = 8192  # of the cache before it grows, for the first sequence
_POSITIONS_EACH = 1024  # of the cache, for sequences beside the first, where nobody says how many


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Only context and kv_dtype change what it computes; but unless it is
    invariant, the last bits of an answer may depend on what runs beside it.

    context: the most positions of a sequence. max_batch: the most sequences at once; others wait.
    cache_positions: of the KV cache, for all sequences together; None: the context, and 1,024 for
    each further sequence. first_positions: that the cache has memory for before it grows; None:
    8,192, and 1,024 for each further sequence. state_places: the most states of layers that are
    saved for other prompts to go on from, where layers have states; None: two for each sequence.
    There is memory for so many at first. host_cache: bytes of host memory for pages and states that
    the GPU has no room for. kv_dtype: "f16", "f32" or "q8". prefill_chunk: the
    most rows of a prefill step. invariant: an answer's logits and tokens are the same to the last
    bit whatever runs beside it, however its prompt is cut, and whether it is cached: all steps use
    the kernels of few rows, so that prefill and single answers are slower.

    speculate: how tokens are drafted, to be verified several in one step. "off": not at all.
    "lookup": from what prompt and answer hold, whenever they hold something. "mtp": by the model's
    own layer, in every step. "draft": by a draft model, in every step. "auto": by the draft model,
    the layer or lookup, the first of these that there is, where that is measured to be faster.

    fuse=False runs every operation as a kernel of its own, raw=False records through the public
    API, ahead=1 waits for every id before the next step. All three are slower; they are there to
    compare with, and to work round a driver's bug.
    """

    context: int
    max_batch: int = 1
    cache_positions: int | None = None
    first_positions: int | None = None
    state_places: int | None = None
    host_cache: int = 0
    kv_dtype: str = "f16"
    prefill_chunk: int = 512
    fuse: bool = True
    raw: bool = True
    ahead: int = AHEAD
    invariant: bool = False
    speculate: str = "off"

    def __post_init__(self) -> None:
        """Raises RequestError for values of the wrong type, and for counts out of range."""
        names = ("context", "prefill_chunk", "ahead", "max_batch")
        optional = ("cache_positions", "first_positions", "state_places")
        for name in (*names, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if type(value) is not int or value < 1:
                raise RequestError(f"`{name}` must be a positive integer, not {shown(value)}.")
        if type(self.host_cache) is not int or self.host_cache < 0:
            raise RequestError(
                f"`host_cache` must be a number of bytes, 0 or more, not {shown(self.host_cache)}."
            )
        if self.max_batch > MAX_BATCH:
            raise RequestError(f"`max_batch` must be at most {MAX_BATCH}, not {self.max_batch}.")
        if self.cache_positions is not None and self.cache_positions < self.context:
            raise RequestError(
                f"A cache of {self.cache_positions:,} positions for all answers together has no "
                f"room for one with a context of {self.context:,}. Ask for a larger cache, or a "
                "smaller `context`."
            )
        for name in ("fuse", "raw", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"`{name}` must be true or false, not {shown(getattr(self, name))}."
                )
        if self.speculate not in WAYS:
            raise RequestError(
                f"`speculate` is one of {', '.join(WAYS)}, not {shown(self.speculate)}."
            )

    @property
    def draft_rows(self) -> int:
        """The most rows of a step with drafts; 0 if nothing is drafted."""
        if self.speculate == "off":
            return 0
        return min(MAX_BATCH, max(DRAFT_ROWS, 2 * self.max_batch))

    @property
    def most_state_places(self) -> int:
        """The most states that are saved."""
        return 2 * self.max_batch if self.state_places is None else self.state_places

    @property
    def first_pages(self) -> int:
        """Pages that the KV cache has memory for at first. It grows as it is used."""
        positions = self.first_positions
        if positions is None:
            positions = _FIRST_POSITIONS + (self.max_batch - 1) * _POSITIONS_EACH
        return min(self.pages, -(-positions // PAGE) + 1)

    @property
    def pages(self) -> int:
        """Pages of the KV cache, at most."""
        if self.cache_positions is not None:
            return -(-self.cache_positions // PAGE)
        others = (self.max_batch - 1) * -(-min(self.context, _POSITIONS_EACH) // PAGE)
        return -(-self.context // PAGE) + 1 + others  # one that what is reused is copied from
