"""The jobs and the faults that hit them, drawn from a seed by pure functions, so that a single turn
can be replayed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

EMBEDDED = "embedded"
CLUSTER = "cluster"

Blow = tuple[str, ...]
"""Names of the faults that are injected together."""

READ_BY_LOADERS = frozenset({"read by loaders"})
LONG_RECIPE = frozenset({"long"})
LONG = LONG_RECIPE | {"long script"}
"""Jobs long enough for a stopped process to be replaced."""
GOSSIP = ("d_psgd", "sgp", "ad_psgd")
SERVERS = ("synchronous servers", "asynchronous servers")
SILOS = ("silos", "silos of a quorum")
OUTSIDE = "clients outside"
CHECKED = "checked"
DIVIDED = ("sharded", "sharded replicas")
WITH_SPARE = ("with a spare", "sharded with a spare")
ON_GPUS = ("on GPUs", "sharded on GPUs")
"""Jobs whose ranks train on the pretended GPU, with the rules of NCCL."""
TUNED = ("sft", "dpo", "reward")
"""Fine-tuning by each method."""
RECIPES = READ_BY_LOADERS | {
    *("one rank", "two ranks", "four ranks", "elastic", "often saved", "clients"),
    *(*DIVIDED, *WITH_SPARE, *ON_GPUS, CHECKED, *TUNED),
    *(*GOSSIP, *SERVERS, *SILOS, OUTSIDE),
}
PREPARED = frozenset({"two optimizers"})
"""A script with two gradient exchanges per batch, whose ranks are replaced in place."""
ANY = RECIPES | PREPARED | {"script"}
GROUPS = RECIPES - {"one rank", OUTSIDE}
LOCAL = frozenset({"one rank", "script", "long script", OUTSIDE})
"""Jobs whose only rank has no actor on the embedded Ray, where the supervisor does its work."""

ON_BOTH: Mapping[Blow, frozenset[str]] = {
    ("rank 0 killed",): RECIPES | PREPARED,
    ("rank killed",): ANY,
    ("rank segfaults",): ANY,
    ("rank out of memory",): ANY,
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
    ("drill corrupt",): frozenset({CHECKED}),
    ("drill corrupt", "rank killed"): frozenset({CHECKED}),
    ("drill corrupt", "service killed"): frozenset({CHECKED}),
    ("preempted",): ANY,
    ("preempted", "rank killed"): RECIPES,
    ("rank killed", "replacement killed"): GROUPS | PREPARED,
    ("machine overloaded", "rank killed"): GROUPS,
    ("machine overloaded", "rank actor killed"): GROUPS,
    ("rank killed", "survivor killed meanwhile"): GROUPS | PREPARED,
    ("rank killed", "service killed"): ANY,
    ("supervisor killed", "service killed"): ANY,
    ("supervisor killed", "gateway killed"): ANY,
    ("rank stopped", "service killed"): GROUPS,
    ("rank 0 killed", "gateway killed"): RECIPES,
    ("node agent killed", "service killed"): ANY,
    ("rank's init stopped", "rank killed"): LONG,
    ("forkserver stopped", "node agent killed"): LONG,
    ("outranked",): ANY,
    ("outranked", "rank killed"): GROUPS,
    ("outranked", "service killed"): ANY,
    ("quota claimed",): ANY,
    ("quota claimed", "supervisor killed"): ANY,
    ("client killed",): frozenset({OUTSIDE}),
    ("client stopped",): frozenset({OUTSIDE}),
    ("client killed", "service killed"): frozenset({OUTSIDE}),
    ("client killed", "rank killed"): frozenset({OUTSIDE}),
}
"""Blows on either ground, and the jobs that each may hit."""
ON_EMBEDDED: Mapping[Blow, frozenset[str]] = {
    ("rank actor killed",): ANY - LOCAL,
    ("machine shut down",): RECIPES,
    ("cluster killed",): ANY,
    ("cluster killed", "service killed"): ANY,
    ("worker parent killed", "supervisor killed"): ANY,
    ("worker parent killed", "rank actor killed"): ANY - LOCAL,
    ("worker parent stopped", "supervisor killed"): LONG,
}
ON_CLUSTER: Mapping[Blow, frozenset[str]] = {
    ("slots recalled",): frozenset({"elastic"}),
    ("slots recalled", "rank killed"): frozenset({"elastic"}),
    ("node killed",): ANY,
    ("node drained",): ANY,
    ("node drained", "service killed"): RECIPES,
    ("service restarted",): ANY,
    ("database restarted",): ANY,
    ("node killed", "database restarted"): ANY,
    ("rank killed", "database restarted"): ANY,
    ("node killed", "service killed"): ANY,
    ("database restarted", "service killed"): ANY,
    ("silo killed",): frozenset(SILOS),
    ("aggregator killed",): frozenset(SILOS),
    ("silo killed", "aggregator killed"): frozenset(SILOS),
    ("silo killed", "service killed"): frozenset(SILOS),
}
STOPPABLE_ON_BOTH: Mapping[str, frozenset[str]] = {
    "rank": LONG_RECIPE | RECIPES,
    "rank's init": LONG,
    "loader": READ_BY_LOADERS,
    "rank actor": LONG,
    "store": LONG_RECIPE,
    "supervisor": LONG,
    "node agent": LONG,
    "forkserver": LONG,
    "gateway": LONG,
    "service": LONG,
}
STOPPABLE: Mapping[str, Mapping[str, frozenset[str]]] = {
    EMBEDDED: {
        **STOPPABLE_ON_BOTH,
        "rank actor": LONG - LOCAL,
        **dict.fromkeys(("worker parent", "raylet", "GCS"), LONG),
    },
    CLUSTER: {**STOPPABLE_ON_BOTH, "silo": frozenset(SILOS), "aggregator": frozenset(SILOS)},
}
"""Processes that may be stopped (SIGSTOP) on each ground, and for which jobs. Ray's own processes
come last, because other processes of Ray can't be found while they are stopped. The same applies to
an agent and its forkserver."""
TWO: Blow = ("two processes stopped",)
BRIEFLY: Blow = ("a process stopped briefly",)
"""Cards for which the plan draws the processes."""
DRAWN: Mapping[Blow, frozenset[str]] = {TWO: LONG, BRIEFLY: LONG}
LAST: Mapping[Blow, frozenset[str]] = {
    ("rank killed", "cancelled meanwhile"): GROUPS,
    ("supervisor killed", "cancelled meanwhile"): RECIPES,
    ("supervisor stopped", "cancelled meanwhile"): LONG,
    ("node agent stopped", "cancelled meanwhile"): LONG,
    ("gateway stopped", "cancelled meanwhile"): LONG,
    ("rank actor stopped", "cancelled meanwhile"): LONG - LOCAL,
}
"""Blows that leave no target and therefore come last in their turn."""

BLOWS: Mapping[str, Mapping[Blow, frozenset[str]]] = {
    ground: {
        **ON_BOTH,
        **more,
        **{(f"{kind} stopped",): fits for kind, fits in STOPPABLE[ground].items()},
    }
    for ground, more in ((EMBEDDED, ON_EMBEDDED), (CLUSTER, ON_CLUSTER))
}
VICTIMS_ON_BOTH = (
    *("two ranks", "long", "four ranks", "long script", "often saved", "elastic"),
    *("read by loaders", "long", "one rank", "long", "two optimizers", "clients"),
    *(OUTSIDE, *GOSSIP, *SERVERS, *DIVIDED, CHECKED, *WITH_SPARE, *ON_GPUS, *TUNED),
)
"""Long jobs have odd indexes, where a turn may end early (`LAST`)."""
VICTIMS: Mapping[str, Sequence[str]] = {
    EMBEDDED: VICTIMS_ON_BOTH,
    CLUSTER: (*VICTIMS_ON_BOTH, *SILOS),
}
"""The victims on each ground, in order. Silos have their own nodes."""
BYSTANDERS = ("short", "sweep", "array", "fails", "cancelled", "script", "array")
TURNS = 32
"""Turns of a complete run, per ground."""
BLOWS_OF_A_TURN = 4
LONG_UNTIL = 0.5
"""Fraction of a long job during which blows are struck. The rest gives the last blow time to be
noticed."""


@dataclass(frozen=True)
class Strike:
    blow: Blow
    at: float
    """Fraction of the victim's steps completed when the blow strikes."""


@dataclass(frozen=True)
class Turn:
    number: int
    victim: str
    """Kind of the targeted job. Faults of the whole service hit both jobs."""
    bystander: str
    strikes: tuple[Strike, ...]
    seed: int
    """Seed for random choices within the turn, such as the rank."""


class Deck:
    """Deals all cards about equally often."""

    def __init__(self, cards: Sequence[Blow], rng: random.Random) -> None:
        self.cards = list(cards)
        self._rng = rng
        self._num_dealt = Counter[Blow]()

    def deal(self, fits: Mapping[Blow, frozenset[str]], victim: str) -> Blow:
        """Deal one of the least dealt cards that fit the victim. Among these prefer a card that
        fits few other victims, because it has fewer chances."""
        fitting = [card for card in self.cards if victim in fits[card]]
        if not fitting:
            raise ValueError(f"no blow fits {victim!r}")
        self._rng.shuffle(fitting)
        card = min(fitting, key=lambda each: (self._num_dealt[each], len(fits[each])))
        self._num_dealt[card] += 1
        return card


def drawn(card: Blow, ground: str, victim: str, rng: random.Random) -> Blow:
    """Return the blow for a card. Some cards leave open which processes are stopped."""
    kinds = [kind for kind, fits in STOPPABLE[ground].items() if victim in fits]
    if card == BRIEFLY:
        return (f"{rng.choice(kinds)} stopped briefly",)
    if card == TWO:
        chosen = rng.sample(kinds, 2)
        return tuple(f"{kind} stopped" for kind in kinds if kind in chosen)
    return card


def turns(seed: int, ground: str, only: str = "") -> Iterator[Turn]:
    """Generate turns without end, unless nothing fits. They depend only on the arguments. only: a
    word that every blow must contain."""
    rng = random.Random(f"{seed} {ground}")
    blows = {**BLOWS[ground], **DRAWN}
    cards = [blow for blow in blows if only in " ".join(blow)]
    deck = Deck(cards, rng)
    last = Deck([blow for blow in LAST if only in " ".join(blow)], rng)
    # If there are only a few blows, use victims that most of them fit.
    victims = [
        victim
        for victim in VICTIMS[ground]
        if not only or 2 * sum(victim in blows[card] for card in cards) > len(cards)
    ]
    if not victims:
        return
    number = 0
    while True:
        victim = victims[number % len(victims)]
        is_last_for = any(victim in LAST[blow] for blow in last.cards)
        ends_early = number % 2 == 1 and is_last_for
        dealt = [
            drawn(deck.deal(blows, victim), ground, victim, rng)
            for _ in range(BLOWS_OF_A_TURN - ends_early)
        ]
        if ends_early:
            dealt.append(last.deal(LAST, victim))
        until = LONG_UNTIL if victim in LONG else 1.0
        strikes = tuple(
            Strike(blow, round(until * (index + rng.uniform(0.3, 0.9)) / (len(dealt) + 0.5), 3))
            for index, blow in enumerate(dealt)
        )
        bystander = BYSTANDERS[number % len(BYSTANDERS)]
        yield Turn(number, victim, bystander, strikes, rng.randrange(1 << 30))
        number += 1
