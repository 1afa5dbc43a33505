"""Which jobs run and what strikes them, drawn by a seed: pure, so that a turn replays alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

EMBEDDED = "embedded"
CLUSTER = "cluster"

Blow = tuple[str, ...]
"""Names of the faults that strike together."""

READ_BY_LOADERS = frozenset({"read by loaders"})
RECIPES = READ_BY_LOADERS | {"one rank", "two ranks", "four ranks", "elastic", "often saved"}
ANY = RECIPES | {"script"}
GROUPS = RECIPES - {"one rank"}

ON_BOTH: Mapping[Blow, frozenset[str]] = {
    ("rank 0 killed",): RECIPES,
    ("rank killed",): ANY,
    ("rank segfaults",): ANY,
    ("rank out of memory",): ANY,
    ("rank stopped",): RECIPES,
    ("loader stopped",): READ_BY_LOADERS,
    ("loader killed",): READ_BY_LOADERS,
    ("rank actor killed",): ANY,
    ("supervisor killed",): ANY,
    ("store killed",): RECIPES,
    ("forkserver killed",): ANY,
    ("node agent killed",): ANY,
    ("gateway killed",): ANY,
    ("service killed",): ANY,
    ("newest checkpoint damaged, supervisor killed",): RECIPES,
    ("disk full",): frozenset({"often saved"}),
    ("drill kill",): GROUPS,
    ("drill stall",): RECIPES,
    ("drill preempt",): RECIPES,
    ("preempted",): ANY,
    ("preempted", "rank killed"): RECIPES,
    ("rank killed", "replacement killed"): GROUPS,
    ("rank killed", "survivor killed meanwhile"): GROUPS,
    ("rank killed", "service killed"): ANY,
    ("supervisor killed", "service killed"): ANY,
    ("supervisor killed", "gateway killed"): ANY,
    ("rank stopped", "service killed"): GROUPS,
    ("rank 0 killed", "gateway killed"): RECIPES,
    ("node agent killed", "service killed"): ANY,
}
"""What may strike, and whom, on either ground."""
ON_EMBEDDED: Mapping[Blow, frozenset[str]] = {
    ("machine shut down",): RECIPES,
    ("cluster killed",): ANY,
    ("cluster killed", "service killed"): ANY,
}
ON_CLUSTER: Mapping[Blow, frozenset[str]] = {
    ("node killed",): ANY,
    ("node drained",): ANY,
    ("node drained", "service killed"): RECIPES,
    ("service stopped",): ANY,
    ("database restarted",): ANY,
    ("node killed", "database restarted"): ANY,
    ("rank killed", "database restarted"): ANY,
    ("node killed", "service killed"): ANY,
    ("database restarted", "service killed"): ANY,
}
LAST: Mapping[Blow, frozenset[str]] = {
    ("rank killed", "cancelled meanwhile"): GROUPS,
    ("supervisor killed", "cancelled meanwhile"): RECIPES,
}
"""What leaves nothing to be struck, and so comes last in its turn."""

BLOWS: Mapping[str, Mapping[Blow, frozenset[str]]] = {
    EMBEDDED: {**ON_BOTH, **ON_EMBEDDED},
    CLUSTER: {**ON_BOTH, **ON_CLUSTER},
}
VICTIMS = (
    *("two ranks", "four ranks", "often saved", "elastic"),
    *("read by loaders", "one rank", "script"),
)
BYSTANDERS = ("short", "script", "fails", "cancelled")
BLOWS_OF_A_TURN = 4


@dataclass(frozen=True)
class Strike:
    blow: Blow
    at: float
    """Share of the victim's steps that are done when it strikes."""


@dataclass(frozen=True)
class Turn:
    number: int
    victim: str
    """Kind of the job that is struck; what strikes the whole service strikes both."""
    bystander: str
    strikes: tuple[Strike, ...]
    seed: int
    """Of what is left to chance within the turn, such as the rank."""


class Deck:
    """Deals each card once before any comes again."""

    def __init__(self, cards: Sequence[Blow], rng: random.Random) -> None:
        self._cards = list(cards)
        self._rng = rng
        self._left: list[Blow] = []

    def deal(self, fits: Mapping[Blow, frozenset[str]], victim: str) -> Blow:
        """The next card that fits the victim."""
        for _ in range(2):
            for card in self._left:
                if victim in fits[card]:
                    self._left.remove(card)
                    return card
            self._left += self._rng.sample(self._cards, len(self._cards))
        raise ValueError(f"nothing strikes {victim!r}")


def turns(seed: int, ground: str) -> Iterator[Turn]:
    """Without end; the same for the same seed."""
    rng = random.Random(f"{seed} {ground}")
    blows, last = BLOWS[ground], Deck(list(LAST), rng)
    deck = Deck(list(blows), rng)
    number = 0
    while True:
        victim = VICTIMS[number % len(VICTIMS)]
        ends_early = number % 4 == 3 and victim != "script"
        dealt = [deck.deal(blows, victim) for _ in range(BLOWS_OF_A_TURN - ends_early)]
        if ends_early:
            dealt.append(last.deal(LAST, victim))
        strikes = tuple(
            Strike(blow, round((place + rng.uniform(0.3, 0.9)) / (len(dealt) + 0.5), 3))
            for place, blow in enumerate(dealt)
        )
        bystander = BYSTANDERS[number % len(BYSTANDERS)]
        yield Turn(number, victim, bystander, strikes, rng.randrange(1 << 30))
        number += 1
