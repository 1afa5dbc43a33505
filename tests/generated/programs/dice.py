"""Dice for the decisions of a generated program; each has its own, so that one can be undone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

One = TypeVar("One")


class Dice:
    """The decisions of one program, and its named points so far."""

    def __init__(self, seed: int, without: frozenset[str]) -> None:
        """without: features that the program must not have."""
        self._seed, self._without = seed, without
        self.features: set[str] = set()
        self.num_points = 0

    def has(self, feature: str, share: float, number: int | str = "") -> bool:
        """Whether the program has the feature at this point."""
        dice = random.Random(f"{self._seed} {feature} {number}")
        is_chosen = feature not in self._without and dice.random() < share
        if is_chosen:
            self.features.add(feature)
        return is_chosen

    def pick(self, name: str, among: Sequence[One], number: int | str = "") -> One:
        return random.Random(f"{self._seed} pick {name} {number}").choice(among)

    def some(self, name: str, among: Sequence[One], number: int | str = "") -> list[One]:
        """Return at least one of these, in any order."""
        dice = random.Random(f"{self._seed} some {name} {number}")
        return dice.sample(among, dice.randint(1, len(among)))

    def point(self) -> str:
        self.num_points += 1
        return f"point({self.num_points - 1})"
