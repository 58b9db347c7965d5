"""One rule for a verdict on a paper's claim."""

from __future__ import annotations

import math
from collections.abc import Mapping

SIGNIFICANT = 0.01
HOLDS, NOT_SHOWN, REVERSED, NOT_TESTABLE = "holds", "not shown", "reversed", "not testable here"


def verdict(row: Mapping[str, float], sign: int = 1) -> str:
    """The verdict on the claim that a difference is above 0 (`sign` -1: below).

    `row` has `ours`, the difference, `p` of its paired test and, for differences that no paired test fits (p is NaN),
    `low` and `high` of its 95% interval. A significant difference of the other sign reverses the claim; one that isn't
    measured (NaN) can't be tested."""
    ours, p = row["ours"], row.get("p", math.nan)
    if math.isnan(ours):
        return NOT_TESTABLE
    shown = p < SIGNIFICANT if not math.isnan(p) else row["low"] > 0 or row["high"] < 0
    return NOT_SHOWN if not shown else HOLDS if ours * sign > 0 else REVERSED
