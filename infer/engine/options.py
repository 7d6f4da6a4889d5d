"""How an engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from infer.engine.speculation import MAX_DRAFT, WAYS
from infer.foreign import shown
from infer.kernels.errors import RequestError
from infer.kernels.state.kv_cache import PAGE

MAX_BATCH = 64
AHEAD = 2  # steps in flight: one runs while the next is recorded
DRAFT_ROWS = 1 + MAX_DRAFT
_POSITIONS_EACH = 1024  # of the cache, for sequences beside the first, where nobody says how many


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Only context and kv_dtype change what it computes; in a batch the last
    bits may differ from those of the same answer alone, unless it is invariant.

    context: positions of a sequence at most. max_batch: sequences that are served at once; more
    wait. cache_positions: of the KV cache, of all sequences together; None: the context, and 1,024
    for each of them but one. kv_dtype: "f16", "f32" or "q8". prefill_chunk: rows of a prefill step
    at most. invariant: an answer's logits and tokens are the same to the last bit whatever runs
    beside it, however its prompt is cut, and whether it is cached: all steps have the kernels of a
    few rows, so that prefill and single answers are slower. speculate: tokens are drafted from what
    prompt and answer hold, and verified many in one step: wherever there are some ("lookup"), where
    that is measured to be faster ("auto"), or only what a schema leaves no choice about, in steps
    of kinds that are there ("off"); by the model's own layer for that, in every step ("mtp") or
    where it is faster ("auto"); with a draft model by that, in every step ("draft") or where it is
    faster ("auto"). fuse=False runs every op as a kernel of its own; raw=False records through
    the public API; ahead=1 waits for every id before the next step. All three are slower, and there
    to compare with and to work round a driver's bug.
    """

    context: int
    max_batch: int = 1
    cache_positions: int | None = None
    kv_dtype: str = "f16"
    prefill_chunk: int = 512
    fuse: bool = True
    raw: bool = True
    ahead: int = AHEAD
    invariant: bool = False
    speculate: str = "off"

    def __post_init__(self) -> None:
        """Raises RequestError for values of other kinds, and counts out of range."""
        for name in ("context", "prefill_chunk", "ahead", "max_batch", "cache_positions"):
            value = getattr(self, name)
            if value is None and name == "cache_positions":
                continue
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} must be a positive integer, not {shown(value)}.")
        if self.max_batch > MAX_BATCH:
            raise RequestError(f"max_batch must be at most {MAX_BATCH}, not {self.max_batch}.")
        if self.cache_positions is not None and self.cache_positions < self.context:
            raise RequestError(
                f"A cache of {self.cache_positions} positions has no room for a context of "
                f"{self.context}. Ask for a larger cache, or a smaller context (--context)."
            )
        for name in ("fuse", "raw", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, not {shown(getattr(self, name))}."
                )
        if self.speculate not in WAYS:
            raise RequestError(
                f"speculate is one of {', '.join(WAYS)}, not {shown(self.speculate)}."
            )

    @property
    def draft_rows(self) -> int:
        """Rows of a step with drafts, at most; 0 without any."""
        if self.speculate == "off":
            return 0
        return min(MAX_BATCH, max(DRAFT_ROWS, 2 * self.max_batch))

    @property
    def pages(self) -> int:
        """Of the KV cache."""
        if self.cache_positions is not None:
            return -(-self.cache_positions // PAGE)
        others = (self.max_batch - 1) * -(-min(self.context, _POSITIONS_EACH) // PAGE)
        return -(-self.context // PAGE) + 1 + others  # one that what is reused is copied from
