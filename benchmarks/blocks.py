"""Step times of two loops that alternate in blocks in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import median_of_ratios
from benchmarks.report import Comparison, Row


@dataclass(frozen=True)
class Times:
    """Seconds per step of each block, in the order in which the blocks ran."""

    dray: Sequence[float]
    plain: Sequence[float]

    @classmethod
    def of(cls, found: Mapping[str, Any], *, steps_per_block: int, warmup_blocks: int) -> Times:
        """Return the times, given the seconds per block that the ranks wrote as `dray_s` and
        `plain_s`."""
        dray, plain = (
            [block / steps_per_block for block in found[key][warmup_blocks:]]
            for key in ("dray_s", "plain_s")
        )
        return cls(dray, plain)

    def pairs(self) -> list[tuple[float, float]]:
        """Return neighbours in A B B A A B B A: the first A and B, the next B and A, and so on."""
        return list(zip(self.dray, self.plain, strict=True))

    def same_pairs(self) -> list[tuple[float, float]]:
        """Return neighbouring blocks of dray's loop (A A), alternating which one is first in the
        pair."""
        neighbours = zip(self.dray[1::2], self.dray[2::2], strict=False)
        return [
            (one, two) if number % 2 else (two, one) for number, (one, two) in enumerate(neighbours)
        ]

    def rows(self, label: str, *, peer: str) -> list[Row]:
        return [Row(f"{label}: dray", self.dray), Row(f"{label}: {peer}", self.plain)]

    def comparison(self, label: str, *, goal: float) -> Comparison:
        """Return the ratio of dray's times to the peer's, with the goal for it."""
        ratio = median_of_ratios(self.pairs())
        return Comparison(
            label=label,
            n=len(self.dray),
            ratio=ratio,
            same=median_of_ratios(self.same_pairs()),
            goal=f"interval includes {goal} or less",
            met=ratio.low <= goal,
        )
