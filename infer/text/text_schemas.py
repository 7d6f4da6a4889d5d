"""Turns the JSON schema of a string into a regular expression, for grammars of unquoted texts.

The expressions are in Rust's dialect, without look-around, which llguidance does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infer.text.schemas import SchemaError

ANY = "(?s:.*)"
NOTHING = r"[^\s\S]"

_HOUR, _60 = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_60}:{_60}(?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:{_60})"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_16_BITS = "[0-9A-Fa-f]{1,4}"
_GROUPS = [rf"{_16_BITS}(?::{_16_BITS}){{0,{n}}}" for n in range(7)]  # up to n + 1 groups
_IPV6 = "|".join(
    [
        f"{_16_BITS}(?::{_16_BITS}){{7}}",
        f"::(?:{_GROUPS[6]})?",
        f"{_GROUPS[6]}::",
        *(f"{_GROUPS[n]}::{_GROUPS[5 - n]}" for n in range(6)),
    ]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PART = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"  # a character of a path
_AUTHORITY = rf"(?:[A-Za-z0-9._~-]+@)?{_HOST}(?::[0-9]{{1,5}})?"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_SECONDS = r"[0-9]+(?:\.[0-9]+)?S"
_TIMES = f"T(?:{_SECONDS}|[0-9]+M(?:{_SECONDS})?|[0-9]+H(?:[0-9]+M(?:{_SECONDS})?)?)"

# The texts of each format, by RFC 3339, 4122, 4291 and 1123, by 5322 without quotes and comments,
# and by 3986 with hosts that are names or IPv4 addresses.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_TIMES})?|{_TIMES}|[0-9]+W)",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOST,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?:\/\/{_AUTHORITY}(?:\/{_PART}*)*|\/?(?:{_PART}+(?:\/{_PART}*)*)?)"
        rf"(?:\?(?:{_PART}|[\/?])*)?(?:#(?:{_PART}|[\/?])*)?"
    ),
}


_NO_TEXT = ("\\b", "\\B", "\\A", "\\z", "\\Z")


def patterns_of(way: Mapping[str, Any]) -> list[str]:
    """Returns regular expressions that a text must match, all of them and from beginning to end, to
    be valid under `way`, one of `schemas.ways_of` with the type "string". If there are none, every
    text is valid. Raises SchemaError for a condition that no regular expression can have."""
    if "enum" in way:
        options = [each for each in way["enum"] if _is_valid(each, way)]
        return ["|".join(map(exactly, options))] if options else [NOTHING]
    patterns = [searched(each) for each in way.get("pattern", ())]
    for name in way.get("format", ()):
        if name not in FORMATS:
            raise SchemaError(f"format {name!r} cannot be followed in texts without quotes")
        patterns.append(FORMATS[name])
    if "minLength" in way or "maxLength" in way:
        most = way.get("maxLength", "")
        patterns.append(f"(?s:.{{{way.get('minLength', 0)},{most}}})")
    return patterns


def exactly(text: str) -> str:
    """Returns a regular expression of exactly this text."""
    return re.escape(text).replace("\\\n", "\\n").replace("\\ ", " ")


def searched(pattern: str) -> str:
    """Returns a regular expression for whole texts in which `pattern` is found somewhere, as JSON
    Schema means patterns. Raises SchemaError if the pattern has `^` or `$` anywhere but at its ends
    or at the ends of its alternatives."""
    written, body, depth = "", "", 0
    before = behind = ANY
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[\w-]+\)|.", pattern, re.DOTALL)
    for at, part in enumerate(parts):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            written += f"{before}(?:{body}){behind}|"
            body, before, behind = "", ANY, ANY
        elif part == "^" and not body and before:
            before = ""
        elif part == "$" and depth == 0 and (at + 1 == len(parts) or parts[at + 1] == "|"):
            behind = ""
        elif part in ("^", "$", *_NO_TEXT) or re.fullmatch(r"\(\?[\w-]+\)", part):
            raise SchemaError(f"pattern {pattern!r}: {part} cannot be followed there")
        else:
            body += part
    return f"{written}{before}(?:{body}){behind}"


def _is_valid(text: str, way: Mapping[str, Any]) -> bool:
    """Whether a text has the form that other parts of the schema ask for."""
    try:
        return all(re.search(each, text) for each in way.get("pattern", ())) and all(
            re.fullmatch(FORMATS[each], text) for each in way.get("format", ())
        )
    except (re.error, KeyError) as error:
        raise SchemaError(f"{error} cannot be followed beside enum") from None
