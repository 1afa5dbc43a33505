"""Reconstruct secrets even if some shares are wrong, and identify the clients that lied.

The owner of a secret commits to it, and in version 2 also to each of its shares. Before a client
reveals anything, it compares each share that it holds with the share's digest, and reports the
shares that it can't use. Therefore, if a client did not report a share, but the share that it
reveals differs from the digest, this client lied. If shares match their digests but not the secret,
the owner of the secret lied. An honest client never looks like a liar, no matter how many clients
lie. In version 1, if a share is wrong, it can't be determined whether its owner or its holder lied.
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
"""Maximum number of subsets of shares to try in a round, not counting the first subset for each
secret."""

Shares = Mapping[str, bytes]
"""Shares by holder."""


class Reconstruction:
    """Reconstructs the secrets of one round."""

    def __init__(self, indices: Mapping[str, int], least: int) -> None:
        """indices: position of each client in the roster. least: number of shares required for a
        secret."""
        self._indices = indices
        self._least = least
        self._subsets_left = MAX_SUBSETS
        self._num_doubts: Counter[str] = Counter()
        self.liars: dict[str, str] = {}
        """The clients that lied, each with a description of its first lie."""
        self.disputes: list[tuple[str, str]] = []
        """(owner, holder) of each wrong share. Either the owner or the holder lied."""

    def blame(self, client: str, lie: str) -> None:
        self.liars.setdefault(client, lie)

    def checked(
        self, owner: str, shares: Shares, digests: Mapping[str, bytes] | None
    ) -> dict[str, bytes]:
        """Return the shares of a secret that match the owner's digests, and blame the holders of
        shares that don't match.

        shares: the shares that were usable when their holders received them. digests: the digests,
        keyed by holder; None in version 1, in which case every share is returned."""
        usable = {}
        for holder, share in shares.items():
            if digests is None or keys.digest_of(share) == digests[holder]:
                usable[holder] = share
            else:
                self.blame(
                    holder,
                    f"the client returned a share of client {owner}'s secret that differs from "
                    "the share it had received",
                )
        return usable

    def secret(
        self, owner: str, usable: Shares, fits: Callable[[bytes], bool], *, has_digests: bool
    ) -> bytes:
        """Reconstruct a client's secret from shares returned by `checked`. Raises WrongShares if
        this is not possible. fits: returns whether a secret matches the owner's commitment."""
        if len(usable) < self._least:
            raise WrongShares(
                owner, f"{self._least} shares are required, but only {len(usable)} are usable"
            )
        for number, holders in enumerate(self._subsets(usable)):
            found = self._combine(holders, usable)
            if found is not None and fits(found):
                if number:
                    self._note_wrong(owner, holders, usable, has_digests=has_digests)
                return found
        if has_digests:
            self.blame(owner, "the client's shares do not match its commitment")
        raise WrongShares(owner, "the shares do not match the client's commitment")

    def _subsets(self, shares: Shares) -> Iterator[Sequence[str]]:
        """Yield sets of `least` holders, starting with the holders that are suspected least
        often."""
        order = sorted(shares, key=lambda name: (self._num_doubts[name], self._indices[name]))
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
        by_index = {self._indices[name]: shares[name] for name in holders}
        return keys.combine(dict(sorted(by_index.items())))

    def _note_wrong(
        self, owner: str, holders: Sequence[str], shares: Shares, *, has_digests: bool
    ) -> None:
        """If digests exist, blame the owner. If there are no digests, record a suspicion against
        the holder of each share that is not on the polynomial through the shares of `holders`."""
        if has_digests:
            self.blame(owner, "the client's shares do not all belong to the same secret")
            return
        known = {self._indices[name]: shares[name] for name in holders}
        for holder in shares.keys() - {*holders}:
            if keys.value_at(self._indices[holder], known) != shares[holder]:
                self._num_doubts[holder] += 1
                self.disputes.append((owner, holder))
