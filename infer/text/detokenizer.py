"""Token ids to text while they arrive, and stop strings in that text."""

from collections.abc import Collection, Sequence

from infer.boundaries import shown
from infer.kernels.errors import RequestError
from infer.text.answer_reader import overlap
from infer.text.tokenizer import Tokenizer

# How many tokens before a new one its text may depend on: three bytes of one character, or the
# token before, without which the new one would be the first and lose its leading space.
CONTEXT = 8


class StreamingDetokenizer:
    """Turns token ids into text piece by piece.

    The pieces join to exactly decode(prompt + output) less what it shares with decode(prompt), and
    none of them ends in half a character. Held back until settled are:
      - a last U+FFFD, which may be a character whose other bytes are still to come;
      - a run of byte tokens (`Tokenizer.byte_token_ids`), since one invalid byte later in the run
        turns all of it into U+FFFD.
    Each id costs one decode of less than 2 * CONTEXT ids, plus one of each run of byte tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        keep: Collection[int] | None = None,
    ) -> None:
        """keep: special tokens that stand in the text, by their names. With None no special token
        does, not even one that only the library takes for special."""
        self._tokenizer, self._keep = tokenizer, keep
        window: list[int] = []  # in reverse order
        # Whether the run of byte tokens at the end, which the output may continue, is all in the
        # window.
        closed = False
        for i in filter(self._is_shown, reversed(prompt_ids)):
            window.append(i)
            closed = closed or i not in tokenizer.byte_token_ids
            if closed and len(window) >= CONTEXT:
                break
        self._window = window[::-1]
        if not self._decode(self._window):
            # Without text before it, the output would be decoded as if it were the first.
            self._window = [i for i in prompt_ids if self._is_shown(i)]
        self._sent = 0  # how many characters of the window's text have been returned
        self._out = 0  # how many characters have been returned in all
        self._run = b""  # the bytes of byte tokens that are held back
        # The prompt's text is needed until the first piece: the output may complete its last
        # character.
        self._prompt_text: str | None = self._decode(self._window)

    def add(self, token_id: int) -> str:
        """Returns the text that this id settles, which may be empty."""
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_token_ids:
            self._run += self._tokenizer.token_bytes(token_id)
            return ""
        self._run = b""
        text = self._decode(self._window)
        piece = self._send(text, len(text) - text.endswith("\ufffd"))
        if len(self._window) >= 2 * CONTEXT and self._prompt_text is None:
            self._shorten(len(text) - self._sent)
        return piece

    @property
    def length(self) -> int:
        """The number of characters of the text so far. A last character that has not arrived
        completely does not count."""
        return self._out + len(self._run.decode(errors="ignore"))

    def finish(self) -> str:
        """Returns the text held back, once no more ids come."""
        text = self._decode(self._window)
        return self._send(text, len(text))

    def _is_shown(self, token_id: int) -> bool:
        return token_id in (self._keep or ()) or self._tokenizer.is_shown(token_id)

    def _decode(self, shown: Sequence[int]) -> str:
        if self._keep is None:
            return self._tokenizer.decode(shown)
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def _send(self, text: str, end: int) -> str:
        if self._prompt_text is not None:
            self._sent = _shared(self._prompt_text, text[:end])
            if end > self._sent:
                self._prompt_text = None
        piece = text[self._sent : end]
        self._out += len(piece)
        self._sent = max(self._sent, end)
        return piece

    def _shorten(self, held: int) -> None:
        window = self._window[-CONTEXT:]
        text = self._decode(window)
        if text:  # as in __init__, a window without text is of no use
            self._window = window
            self._sent = len(text) - held


class StopStrings:
    """Cuts a text that arrives in pieces before the first stop string.

    The first is the one complete first, the longest of those that end together, so that it does
    not matter how the text is cut into pieces. Held back is only what may begin a stop string.

    Attributes:
        hit: the stop string that was found, None so far.
    """

    def __init__(self, stops: str | Sequence[str], *, include: bool = False) -> None:
        """
        include: cut behind the stop string.

        Raises:
            RequestError: a stop string that is empty or not text.
        """
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise RequestError(
                f"Stop strings must be texts that are not empty, not {shown(stops)}."
            )
        self._held, self._include = "", include
        self.hit: str | None = None

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """Returns the text that may be shown now; after a hit there is none. may_end: whether a
        stop string that this piece completes counts."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if found and may_end:
            end, start, self.hit = min(found)
            self._held = ""
            return text[: end if self._include else start]
        end = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns the text held back, once no more comes."""
        held, self._held = self._held, ""
        return held


def _shared(a: str, b: str) -> int:
    """Returns the length of the longest beginning that both texts have."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
