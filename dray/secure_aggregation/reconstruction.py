"""Secrets from shares of which some are wrong, and the clients that lied about theirs.

The owner of a secret commits to it, and in version 2 to each of its shares as well. The holder of a
share compares it with that digest before it reveals anything, and states which shares it can't use.
So a share that differs from its digest later is its holder's lie, and shares that fit their digests
and do not give the secret are their owner's: no honest client can be made to look like a liar,
however many lie. In version 1 a wrong share is its owner's lie or its holder's, and the two can't
be told apart.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice, repeat
from math import comb

from dray.secure_aggregation import keys
from dray.secure_aggregation.messages import WrongShares

MAX_SUBSETS = 200
"""Subsets of shares that are tried in a round, besides the first of each secret."""

Shares = Mapping[str, bytes]
"""By holder."""


class Reconstruction:
    """The secrets of one round."""

    def __init__(self, places: Mapping[str, int], least: int) -> None:
        """places: of the clients of the roster. least: the number of shares that give a secret."""
        self._places = places
        self._least = least
        self._subsets_left = MAX_SUBSETS
        self._num_doubts: Counter[str] = Counter()
        self.liars: dict[str, str] = {}
        """The clients that have lied, each with its first lie."""
        self.disputes: list[tuple[str, str]] = []
        """(owner, holder) of shares that do not fit, where either of the two has lied."""

    def blame(self, client: str, lie: str) -> None:
        self.liars.setdefault(client, lie)

    def checked(
        self, owner: str, shares: Shares, digests: Mapping[str, bytes] | None
    ) -> dict[str, bytes]:
        """The shares of a secret that fit the owner's digests; blames the holders of the others.

        shares: those that their holders could use when they got them. digests: by holder; None in
        version 1, where every share is taken.
        """
        usable = {}
        for holder, share in shares.items():
            if digests is None or keys.digest_of(share) == digests[holder]:
                usable[holder] = share
            else:
                self.blame(holder, f"its share of a secret of {owner} is not the one that it got")
        return usable

    def secret(
        self, owner: str, usable: Shares, fits: Callable[[bytes], bool], *, has_digests: bool
    ) -> bytes:
        """The secret of a client, of shares that were `checked`. WrongShares if it can't be put
        together. fits: whether a secret is the one that the owner has committed to."""
        if len(usable) < self._least:
            raise WrongShares(
                owner, f"{self._least} are needed, and {len(usable)} of them can be used"
            )
        for number, holders in enumerate(self._subsets(usable)):
            found = self._combine(holders, usable)
            if found is not None and fits(found):
                if number:
                    self._note_wrong(owner, holders, usable, has_digests=has_digests)
                return found
        if has_digests:
            self.blame(owner, "its shares do not give the secret that it has committed to")
        raise WrongShares(owner, "they do not give the secret that it has committed to")

    def _subsets(self, shares: Shares) -> Iterator[Sequence[str]]:
        """Sets of holders that are enough; first those that were doubted least."""
        order = sorted(shares, key=lambda name: (self._num_doubts[name], self._places[name]))
        yield order[: self._least]
        generator = random.Random(0)
        is_few = comb(len(order), self._least) <= self._subsets_left
        others: Iterator[Sequence[str]]
        if is_few:
            others = combinations(order, self._least)
        else:
            others = (tuple(generator.sample(order, self._least)) for _ in repeat(None))
        for each in islice(others, self._subsets_left):
            self._subsets_left -= 1
            yield each

    def _combine(self, holders: Sequence[str], shares: Shares) -> bytes | None:
        by_place = {self._places[name]: shares[name] for name in holders}
        return keys.combine(dict(sorted(by_place.items())))

    def _note_wrong(
        self, owner: str, holders: Sequence[str], shares: Shares, *, has_digests: bool
    ) -> None:
        """Note whose shares of a secret are not on the polynomial of these holders' shares."""
        if has_digests:
            self.blame(owner, "its shares do not fit together")
            return
        known = {self._places[name]: shares[name] for name in holders}
        for holder in shares.keys() - {*holders}:
            if keys.value_at(self._places[holder], known) != shares[holder]:
                self._num_doubts[holder] += 1
                self.disputes.append((owner, holder))
