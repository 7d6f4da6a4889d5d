"""Encodes a long text piece by piece: it takes little memory, and may stop after any piece.

Each window of the text begins within the window before it. Where both have equal tokens at equal
places for a while, they are joined, and nothing but memory differs from encoding the text at once:

* A tokenizer splits a text into words from left to right. From a place on where two windows both
  split it, they go on alike.
* BPE merges a word into the tokens t1, t2, ... if and only if it merges the text of every two that
  follow each other into these two. Any two here follow each other in one of the windows. With other
  models the joint has to be between words.

Where two windows never agree, such as in a word that is longer than both, one window that holds
both is encoded.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from tokenizers import Encoding

PIECE = 1 << 16  # how many characters a window goes beyond the window before it
_OVERLAP = 256  # tokens in two windows; up to twice as many, to begin with a word
_BEFORE, _AFTER = 8, 32  # tokens that must be equal before and after a joint

_Token = tuple[int, int, bool]  # its id, its place in the text, whether it begins a word


def encode_pieces(
    encode: Callable[[str], Encoding], text: str, in_words: bool
) -> Iterator[list[int]]:
    """Yields the ids of a text. Each piece but the last has at least two ids or is empty; an empty
    piece says that nothing is known yet and that encoding goes on.

    encode: encodes a text with the library, which tells each token's place. in_words: whether
    pieces may be joined within words: the tokenizer is BPE, and all its places are right.
    """
    begin, end = 0, PIECE
    tokens = _tokens(encode(text[:end]), 0)
    first = 0  # the first token that is in no piece yet
    while end < len(text):
        following = min(end + PIECE, len(text))
        near = len(tokens) - _OVERLAP
        words = (i for i in range(near, near - _OVERLAP, -1) if i > first and tokens[i][2])
        start = next(words, near)
        joint = None
        if start > first:
            place = tokens[start][1]
            after = _tokens(encode(text[place:following]), place)
            joint = _joint(tokens, max(start, first + 2), after, in_words)
        if joint is None:
            end = min(2 * end - begin, len(text))
            tokens = _tokens(encode(text[begin:end]), begin)
            yield []
        else:
            last, then = joint
            yield [token for token, _, _ in tokens[first:last]]
            begin, end, tokens, first = place, following, after, then
    yield [token for token, _, _ in tokens[first:]]


def _tokens(encoding: Encoding, begin: int) -> list[_Token]:
    """Returns the tokens of a window that begins at the character `begin`."""
    words = encoding.word_ids
    return [
        (token, begin + place, word != before)
        for token, (place, _), word, before in zip(
            encoding.ids, encoding.offsets, words, [-1, *words], strict=False
        )
    ]


def _joint(
    tokens: Sequence[_Token], first: int, after: Sequence[_Token], in_words: bool
) -> tuple[int, int] | None:
    """Returns the first token, from index `first` on, around which a window and the window after it
    agree, as its index in both; None if there is none."""
    index = {
        token[1]: i for i, (before, token) in enumerate(pairwise(after), 1) if token[1] > before[1]
    }  # several tokens may be of one character
    for i in range(first, len(tokens) - _AFTER):
        j = index.get(tokens[i][1]) if tokens[i][1] > tokens[i - 1][1] else None
        if j is not None and (in_words or tokens[i][2]):
            before = min(i, j, _BEFORE)
            if tokens[i - before : i + _AFTER] == after[j - before : j + _AFTER]:
                return i, j
    return None
