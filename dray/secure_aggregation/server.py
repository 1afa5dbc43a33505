"""The server's half of a round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from dray.secure_aggregation import keys, shamir
from dray.secure_aggregation.errors import MessageRefused, TooFewClients, WrongShares
from dray.secure_aggregation.fixed_point import Aggregate, FixedPoint, Ring
from dray.secure_aggregation.keys import KeyPair
from dray.secure_aggregation.messages import (
    MAX_CLIENTS,
    ConsistencyCodes,
    DeliveredShares,
    KeyAdvertisement,
    MaskingPhase,
    MaskingSettings,
    RevealedShares,
    Roster,
    RosterEntry,
    SharedKeys,
    Survivors,
)


class MaskingServer:
    """Collects the messages of each phase until its owner calls `advance`, at a deadline or when
    all are there. Masked updates are added up as they come, and not kept.

    It may be in parts, each of which receives the masked updates of some clients and all other
    messages of all clients; the results of `partial_sum` of all parts are added up.
    """

    def __init__(self, settings: MaskingSettings) -> None:
        self._settings = settings
        self.phase = MaskingPhase.ADVERTISE_KEYS
        self._answered: dict[str, bytes] = {}
        """The digest of each message of the phase, by client."""
        self.expected: frozenset[str] | None = None
        """The clients that may answer in this phase; None in the first, where any client may."""
        self._least = settings.least_clients(0)
        self._keys: dict[str, KeyAdvertisement] = {}
        self._places: dict[str, int] = {}
        self._transcript = b""
        self._encoding: FixedPoint | None = None
        self._sum: Ring | None = None
        self._shared: dict[str, SharedKeys] = {}
        self._survivors: tuple[str, ...] = ()
        self._codes: dict[str, ConsistencyCodes] = {}
        self._revealed: dict[str, RevealedShares] = {}
        self._removals: list[tuple[bytes, Literal[1, -1]]] = []
        """The seed of each mask that is in the sum, with the sign with which it goes out of it."""

    @property
    def answered(self) -> frozenset[str]:
        """Those whose message of this phase has been taken."""
        return frozenset(self._answered)

    @property
    def least(self) -> int:
        """The number of answers without which `advance` fails."""
        if self.phase is MaskingPhase.ADVERTISE_KEYS:
            return self._settings.least_clients(len(self._answered))
        return self._least

    def receive(self, client: str, phase: MaskingPhase, message: bytes) -> None:
        """Take a client's message of a phase. The same one again is no error.

        MessageRefused, which names the client, if it is late, not expected or malformed, or another
        one than it has sent before.
        """
        if phase is not self.phase or phase is MaskingPhase.ENDED:
            raise MessageRefused(client, f"it is of {phase}, and the round is in {self.phase}")
        digest = hashlib.sha256(message).digest()
        if client in self._answered:
            if self._answered[client] != digest:
                raise MessageRefused(client, f"it has sent another one in {phase}")
            return
        if self.expected is not None and client not in self.expected:
            raise MessageRefused(client, f"it was lost before {phase}")
        takes: dict[MaskingPhase, Callable[[str, bytes], None]] = {
            MaskingPhase.ADVERTISE_KEYS: self._take_keys,
            MaskingPhase.SHARE_KEYS: self._take_shares,
            MaskingPhase.MASKED_INPUT: self._take_masked_input,
            MaskingPhase.CONSISTENCY_CHECK: self._take_codes,
            MaskingPhase.UNMASK: self._take_revealed,
        }
        takes[phase](client, message)
        self._answered[client] = digest

    def received_elsewhere(self, clients: Iterable[str]) -> None:
        """In masked_input: another part of the server has the masked updates of these clients."""
        assert self.phase is MaskingPhase.MASKED_INPUT
        self._answered.update(dict.fromkeys(clients, b""))

    def advance(self) -> Mapping[str, bytes]:
        """End the phase; the message for each client that may answer in the next one.

        TooFewClients if fewer than `least` have answered; more may still come then. WrongShares, in
        the last phase, if a client's secrets can't be put together.
        """
        came = sorted(self._answered)
        if len(came) < self.least:
            raise TooFewClients(
                f"{len(came)} clients have answered in {self.phase}, and {self.least} are needed"
            )
        match self.phase:
            case MaskingPhase.ADVERTISE_KEYS:
                messages, after = self._roster(came), MaskingPhase.SHARE_KEYS
            case MaskingPhase.SHARE_KEYS:
                sealed = {name: self._shared[name].shares for name in came}
                messages = {
                    name: DeliveredShares(shares=shares).to_bytes()
                    for name, shares in _for_each(sealed).items()
                }
                after = MaskingPhase.MASKED_INPUT
            case MaskingPhase.MASKED_INPUT:
                self._survivors = tuple(came)
                told = Survivors(clients=came).to_bytes()
                messages, after = dict.fromkeys(came, told), MaskingPhase.CONSISTENCY_CHECK
            case MaskingPhase.CONSISTENCY_CHECK:
                codes = {name: self._codes[name].codes for name in came}
                messages = {
                    name: ConsistencyCodes(codes=each).to_bytes()
                    for name, each in _for_each(codes).items()
                }
                after = MaskingPhase.UNMASK
            case MaskingPhase.UNMASK:
                self._find_masks()
                messages, after = {}, MaskingPhase.ENDED
            case MaskingPhase.ENDED:
                return {}
        self.phase, self._answered, self.expected = after, {}, frozenset(messages)
        return messages

    def aggregate(self) -> Aggregate:
        """The result, once the round has ended."""
        return self.decode(self.partial_sum())

    def partial_sum(self, part: int = 0, num_parts: int = 1) -> Ring:
        """The masked updates that this part of the server has received, with a share of the masks
        removed. All parts together are the sum without masks, modulo 2**bits."""
        assert self.phase is MaskingPhase.ENDED
        assert self._encoding is not None
        total = self._encoding.zeros() if self._sum is None else self._sum.copy()
        for seed, sign in self._removals[part::num_parts]:
            self._encoding.add_mask(total, seed, sign)
        return total

    def decode(self, total: Ring) -> Aggregate:
        """The result, of the sum of all parts."""
        assert self._encoding is not None
        return self._encoding.decode(total, self._survivors)

    # Each phase: what is taken, and what is said at its end.

    def _take_keys(self, client: str, message: bytes) -> None:
        found = KeyAdvertisement.from_bytes(message, client)
        taken = {key for one in self._keys.values() for key in (one.sealing_key, one.masking_key)}
        if found.sealing_key == found.masking_key or taken & {found.sealing_key, found.masking_key}:
            raise MessageRefused(client, "it has a key that is there already")
        if len(self._keys) == MAX_CLIENTS:
            raise MessageRefused(client, f"the round has {MAX_CLIENTS} clients already")
        for key in (found.sealing_key, found.masking_key):
            try:
                KeyPair().agree(key)
            except ValueError:
                raise MessageRefused(client, "a key of it is no usable point") from None
        self._keys[client] = found

    def _roster(self, came: list[str]) -> Mapping[str, bytes]:
        self._least = self._settings.least_clients(len(came))
        self._places = {name: place for place, name in enumerate(came, 1)}
        self._encoding = FixedPoint.of(self._settings, len(came))
        entries = [RosterEntry(name=name, **self._keys[name].model_dump()) for name in came]
        told = Roster(clients=entries).to_bytes()
        self._transcript = keys.transcript_of(self._settings, told)
        return dict.fromkeys(came, told)

    def _take_shares(self, client: str, message: bytes) -> None:
        found = SharedKeys.from_bytes(message, client)
        if found.shares.keys() != self._places.keys() - {client}:
            raise MessageRefused(client, "it has not one share for each other client of the roster")
        self._shared[client] = found

    def _take_masked_input(self, client: str, message: bytes) -> None:
        if len(message) != self._settings.masked_bytes:
            raise MessageRefused(
                client, f"it has {len(message)} bytes, not {self._settings.masked_bytes}"
            )
        assert self._encoding is not None
        if self._sum is None:
            self._sum = self._encoding.zeros()
        self._sum += self._encoding.read(message)

    def _take_codes(self, client: str, message: bytes) -> None:
        found = ConsistencyCodes.from_bytes(message, client)
        if found.codes.keys() != {*self._survivors} - {client}:
            raise MessageRefused(client, "it has not one code for each other survivor")
        self._codes[client] = found

    def _take_revealed(self, client: str, message: bytes) -> None:
        found = RevealedShares.from_bytes(message, client)
        if not found.seeds.keys() <= {*self._survivors}:
            raise MessageRefused(client, "it has a share of the seed of a client that was lost")
        if not found.masking_keys.keys() <= self._lost:
            raise MessageRefused(client, "it has a share of the masking key of a survivor")
        self._revealed[client] = found

    @property
    def _lost(self) -> set[str]:
        """Clients with whom others have masks, and whose masked updates did not come."""
        return {*self._shared} - {*self._survivors}

    def _find_masks(self) -> None:
        """Put together the seeds of all masks that are in the sum."""
        removals: list[tuple[bytes, Literal[1, -1]]] = []
        for name in self._survivors:
            shares = {at: one.seeds.get(name) for at, one in self._revealed.items()}
            seed = self._secret(name, shares)
            if keys.commitment_of(seed) != self._shared[name].commitment:
                raise WrongShares(name, "its seed is not the one that it has committed to")
            removals.append((seed, -1))
        for name in sorted(self._lost):
            shares = {at: one.masking_keys.get(name) for at, one in self._revealed.items()}
            pair = KeyPair(self._secret(name, shares))
            if pair.public != self._keys[name].masking_key:
                raise WrongShares(name, "its masking key is not that of the roster")
            for other in self._survivors:
                seed = pair.agree(self._keys[other].masking_key, keys.MASKS, self._transcript)
                was_added = self._places[other] < self._places[name]
                removals.append((seed, -1 if was_added else 1))
        self._removals = removals

    def _secret(self, name: str, shares: Mapping[str, bytes | None]) -> bytes:
        """Of a client, from the first shares of it that are enough."""
        there = {self._places[at]: share for at, share in shares.items() if share is not None}
        if len(there) < self._least:
            raise WrongShares(name, f"{self._least} are needed, and {len(there)} can be read")
        secret = shamir.combine(dict(sorted(there.items())[: self._least]))
        if secret is None:
            raise WrongShares(name, "they give no secret")
        return secret


def _for_each(sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
    """By recipient and sender, of the senders alone, what was sent by sender and recipient."""
    return {
        name: {each: parts[name] for each, parts in sent.items() if each != name} for name in sent
    }
