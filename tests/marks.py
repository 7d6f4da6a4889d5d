"""Marks that divide many cases between the default run and the full run."""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest


def others_full(
    name: str, cases: Iterable[object], default: Container[object]
) -> pytest.MarkDecorator:
    """Parametrizes the argument of that name by `cases`: those that are not in `default` are of the
    full run."""
    return pytest.mark.parametrize(
        name,
        [case if case in default else pytest.param(case, marks=pytest.mark.full) for case in cases],
    )
