"""How token sequences begin alike, and the names of their beginnings."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many first tokens of two sequences of one type are equal, in a time that grows
    with that number."""
    low, high, most = 0, 16, min(len(a), len(b))
    while low < most and a[low:high] == b[low:high]:
        low, high = min(high, most), 2 * high
    high = min(high, most)
    while low < high:  # the first `low` are equal, and no more than `high` are
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def root_name(key: Hashable) -> bytes:
    """Returns the name of the beginning of all texts with a key, which is made of texts, numbers
    and None."""
    return hashlib.blake2b(repr(key).encode(), digest_size=16).digest()


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the name of a page of tokens behind the page of that name."""
    own = np.asarray(tokens, np.uint32).tobytes()
    return hashlib.blake2b(own, digest_size=16, key=before).digest()


def page_names(tokens: Sequence[int], key: Hashable, page_size: int) -> list[bytes]:
    """Returns the name of the beginning, and of each whole page."""
    names = [root_name(key)]
    for end in range(page_size, len(tokens) + 1, page_size):
        names.append(page_name(names[-1], tokens[end - page_size : end]))
    return names
