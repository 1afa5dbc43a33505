"""The server's side of a round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from dray.secure_aggregation import keys
from dray.secure_aggregation.fixed_point import Aggregate, FixedPoint, Ring
from dray.secure_aggregation.keys import KeyPair
from dray.secure_aggregation.messages import (
    KEY_BYTES,
    MAX_CLIENTS,
    VERSION,
    ConsistencyCodes,
    DeliveredShares,
    KeyAdvertisement,
    MaskingPhase,
    MaskingSettings,
    MessageRefused,
    RevealedShares,
    Roster,
    RosterEntry,
    SharedKeys,
    Survivors,
    TooFewClients,
    WrongShares,
)
from dray.secure_aggregation.reconstruction import Reconstruction


class MaskingServer:
    """Collects the messages of each phase until `advance` is called, for example at a deadline or
    when every client has responded. Masked updates are summed on arrival and not stored.

    A server can consist of several parts. Each part receives the masked updates of some clients,
    and all other messages of all clients. The sum of the `partial_sum` of all parts is the result.
    """

    def __init__(self, settings: MaskingSettings, oldest_version: int = 1) -> None:
        """oldest_version: the oldest version with which clients are allowed to take part."""
        self._settings = settings
        self._oldest_version = oldest_version
        self.version = VERSION
        """The version of the round, valid once the roster is known."""
        self.phase = MaskingPhase.ADVERTISE_KEYS
        self._answered: dict[str, bytes] = {}
        """The digest of each client's message in this phase."""
        self.expected: frozenset[str] | None = None
        """The clients that are allowed to send a message in this phase. None in the first phase, in
        which any client is allowed to send a message."""
        self._least = settings.least_clients(0)
        self._keys: dict[str, KeyAdvertisement] = {}
        self._indices: dict[str, int] = {}
        self._transcript = b""
        self._encoding: FixedPoint | None = None
        self._sum: Ring | None = None
        self._shared: dict[str, SharedKeys] = {}
        self._survivors: tuple[str, ...] = ()
        self._codes: dict[str, ConsistencyCodes] = {}
        self._revealed: dict[str, RevealedShares] = {}
        self._reconstruction = Reconstruction({}, 0)
        self.lost_secrets: frozenset[str] = frozenset()
        """The clients whose secrets could not be reconstructed. If there are such clients, the
        round has no result."""
        self._removals: list[tuple[bytes, Literal[1, -1]]] = []
        """The seed of each mask that the sum contains, and the sign with which adding the mask
        removes it from the sum."""

    @property
    def answered(self) -> frozenset[str]:
        """The clients whose message was accepted in this phase."""
        return frozenset(self._answered)

    @property
    def least(self) -> int:
        """The minimum number of messages that `advance` requires."""
        if self.phase is MaskingPhase.ADVERTISE_KEYS:
            return self._settings.least_clients(len(self._answered))
        return self._least

    @property
    def liars(self) -> Mapping[str, str]:
        """The clients that lied about shares, each with a description of its lie. The result is
        valid once the last phase has ended or failed. Never includes a client that followed the
        protocol."""
        return self._reconstruction.liars

    @property
    def disputes(self) -> Sequence[tuple[str, str]]:
        """(owner, holder) of each wrong share in a version 1 round. Either the owner or the holder
        lied."""
        return self._reconstruction.disputes

    def receive(self, client: str, phase: MaskingPhase, message: bytes) -> None:
        """Accept a client's message for a phase. Repeating the same message is not an error.

        Raises MessageRefused, which names the client, if the message is late, unexpected or
        malformed, or differs from an earlier message in this phase.
        """
        if phase is not self.phase or phase is MaskingPhase.ENDED:
            raise MessageRefused(
                client, f"the message is for phase {phase}, but the round is in phase {self.phase}"
            )
        digest = hashlib.sha256(message).digest()
        if client in self._answered:
            if self._answered[client] != digest:
                raise MessageRefused(
                    client, f"the client has already sent a different message in phase {phase}"
                )
            return
        if self.expected is not None and client not in self.expected:
            raise MessageRefused(client, f"the client was lost before the phase {phase}")
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
        """Record, in the phase masked_input, that another part of the server has these clients'
        updates."""
        assert self.phase is MaskingPhase.MASKED_INPUT
        self._answered.update(dict.fromkeys(clients, b""))

    def advance(self) -> Mapping[str, bytes]:
        """End the phase, and return the message for each client that is allowed to respond in the
        next phase. Raises TooFewClients if fewer than `least` clients have responded. The phase
        then continues, and more clients can respond. Raises WrongShares in the last phase if a
        client's secrets can't be reconstructed.
        """
        came = sorted(self._answered)
        if len(came) < self.least:
            raise TooFewClients(
                f"only {len(came)} clients have responded in phase {self.phase}, but {self.least} "
                "are required"
            )
        match self.phase:
            case MaskingPhase.ADVERTISE_KEYS:
                messages, after = self._roster(came), MaskingPhase.SHARE_KEYS
            case MaskingPhase.SHARE_KEYS:
                sealed = {name: self._shared[name].shares for name in came}
                messages = {
                    name: DeliveredShares(
                        shares=shares, digests=self._digests_for(name, shares)
                    ).to_bytes()
                    for name, shares in _for_each(sealed).items()
                }
                after = MaskingPhase.MASKED_INPUT
            case MaskingPhase.MASKED_INPUT:
                self._survivors = tuple(came)
                survivors = Survivors(clients=came).to_bytes()
                messages, after = dict.fromkeys(came, survivors), MaskingPhase.CONSISTENCY_CHECK
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
        """Return the result of the round, which must have ended."""
        return self.decode(self.partial_sum())

    def partial_sum(self, part: int = 0, num_parts: int = 1) -> Ring:
        """Return the sum of the masked updates that this part of the server received, minus the
        masks that this part has to remove. The total over all parts is the sum of the updates
        without masks, modulo 2**bits."""
        assert self.phase is MaskingPhase.ENDED
        assert self._encoding is not None
        total = self._encoding.zeros() if self._sum is None else self._sum.copy()
        for seed, sign in self._removals[part::num_parts]:
            self._encoding.add_mask(total, seed, sign)
        return total

    def decode(self, total: Ring) -> Aggregate:
        """Return the result that is encoded in the sum of all parts."""
        assert self._encoding is not None
        return self._encoding.decode(total, self._survivors)

    # Each phase has two methods: one accepts a client's message, and the other builds the server's
    # messages at the end of the phase.

    def _take_keys(self, client: str, message: bytes) -> None:
        found = KeyAdvertisement.from_bytes(message, client)
        if (version := found.version or 1) < self._oldest_version:
            raise MessageRefused(
                client,
                f"the client uses version {version} of the protocol, which is no longer accepted: "
                "an earlier round failed because a client lied about a share, and this version "
                "can't identify such a client. Update with pip install -U 'dray[client]'",
            )
        taken = {key for one in self._keys.values() for key in (one.sealing_key, one.masking_key)}
        if found.sealing_key == found.masking_key or taken & {found.sealing_key, found.masking_key}:
            raise MessageRefused(client, "the message contains a key that has already been sent")
        if len(self._keys) == MAX_CLIENTS:
            raise MessageRefused(client, f"the round already has {MAX_CLIENTS} clients")
        for key in (found.sealing_key, found.masking_key):
            try:
                KeyPair().agree(key)
            except ValueError:
                raise MessageRefused(
                    client, "the message contains a key that is not a usable public key"
                ) from None
        self._keys[client] = found

    def _roster(self, came: list[str]) -> Mapping[str, bytes]:
        self._least = self._settings.least_clients(len(came))
        self._indices = {name: index for index, name in enumerate(came, 1)}
        self._encoding = FixedPoint.of(self._settings, len(came))
        self._reconstruction = Reconstruction(self._indices, self._least)
        self.version = min(VERSION, *(self._keys[name].version or 1 for name in came))
        entries = [
            RosterEntry(name=name, **self._keys[name].model_dump(exclude={"version"}))
            for name in came
        ]
        version = None if self.version == 1 else self.version
        roster = Roster(clients=entries, version=version).to_bytes()
        self._transcript = keys.transcript_of(self._settings, roster)
        return dict.fromkeys(came, roster)

    def _take_shares(self, client: str, message: bytes) -> None:
        found = SharedKeys.from_bytes(message, client)
        if found.shares.keys() != self._indices.keys() - {client}:
            raise MessageRefused(
                client,
                "the message must contain exactly one share for each of the other clients in "
                "the roster",
            )
        digested = set() if found.digests is None else found.digests.keys()
        if digested != (self._indices.keys() if self.version > 1 else set()):
            raise MessageRefused(
                client,
                "the message must contain digests for exactly the clients in the roster",
            )
        self._shared[client] = found

    def _digests_for(self, client: str, senders: Iterable[str]) -> dict[str, bytes] | None:
        """Return the digests of the shares for a client, keyed by sender."""
        if self.version == 1:
            return None
        return {name: (self._shared[name].digests or {})[client] for name in senders}

    def _take_masked_input(self, client: str, message: bytes) -> None:
        if len(message) != self._settings.masked_bytes:
            raise MessageRefused(
                client, f"the message has {len(message)} bytes, not {self._settings.masked_bytes}"
            )
        assert self._encoding is not None
        if self._sum is None:
            self._sum = self._encoding.zeros()
        self._sum += self._encoding.read(message)

    def _take_codes(self, client: str, message: bytes) -> None:
        found = ConsistencyCodes.from_bytes(message, client)
        if found.codes.keys() != {*self._survivors} - {client}:
            raise MessageRefused(
                client, "the message must contain exactly one code for each of the other survivors"
            )
        if not {*(found.unusable or ())} <= self._shared.keys() - {client}:
            raise MessageRefused(
                client, "the client reports shares as unusable, but was never sent these shares"
            )
        self._codes[client] = found

    def _take_revealed(self, client: str, message: bytes) -> None:
        found = RevealedShares.from_bytes(message, client)
        if not found.seeds.keys() <= {*self._survivors}:
            raise MessageRefused(client, "the message contains a share of a lost client's seed")
        if not found.masking_keys.keys() <= self._lost:
            raise MessageRefused(client, "the message contains a share of a survivor's masking key")
        self._revealed[client] = found

    @property
    def _lost(self) -> set[str]:
        """The clients that share masks with other clients, but did not send a masked update."""
        return {*self._shared} - {*self._survivors}

    def _find_masks(self) -> None:
        """Reconstruct the seeds of all masks in the sum. Raises WrongShares only after trying all
        seeds, since each attempt can reveal another liar."""
        removals: list[tuple[bytes, Literal[1, -1]]] = []
        errors: dict[str, WrongShares] = {}
        for name in self._survivors:
            try:
                removals.append((self._seed(name), -1))
            except WrongShares as error:
                errors[name] = error
        for name in sorted(self._lost):
            try:
                pair = KeyPair(self._masking_key(name))
            except WrongShares as error:
                errors[name] = error
                continue
            for other in self._survivors:
                seed = pair.agree(self._keys[other].masking_key, keys.MASKS, self._transcript)
                was_added = self._indices[other] < self._indices[name]
                removals.append((seed, -1 if was_added else 1))
        self.lost_secrets = frozenset(errors)
        if errors:
            raise next(iter(errors.values()))
        self._removals = removals

    def _seed(self, name: str) -> bytes:
        """Return the seed of a survivor's private mask. If the survivor has not revealed the seed,
        it is reconstructed from its shares."""
        shares = self._shares(name, {at: one.seeds for at, one in self._revealed.items()})

        def fits(seed: bytes) -> bool:
            return keys.commitment_of(seed) == self._shared[name].commitment

        revealed = self._revealed.get(name)
        if revealed is not None and (seed := revealed.own_seed) is not None:
            if fits(seed):
                return seed
            self._reconstruction.blame(name, "the client's seed does not match its commitment")
        return self._reconstruction.secret(name, shares, fits, has_digests=self.version > 1)

    def _masking_key(self, name: str) -> bytes:
        """Return the masking key of a lost client, reconstructed from its shares."""
        shares = self._shares(name, {at: one.masking_keys for at, one in self._revealed.items()})

        def fits(key: bytes) -> bool:
            return KeyPair(key).public == self._keys[name].masking_key

        return self._reconstruction.secret(name, shares, fits, has_digests=self.version > 1)

    def _shares(
        self, owner: str, revealed: Mapping[str, Mapping[str, bytes]]
    ) -> Mapping[str, bytes]:
        """Return the shares of a secret of the client `owner`, keyed by holder. Shares that were
        unusable when the holder received them, or have changed since, are omitted. revealed: the
        shares, keyed by holder and owner."""
        found = {
            holder: shares[owner]
            for holder, shares in revealed.items()
            if owner in shares and owner not in (self._codes[holder].unusable or ())
        }
        digests = self._shared[owner].digests
        if digests is not None:
            is_lost = owner in self._lost
            part = slice(KEY_BYTES) if is_lost else slice(KEY_BYTES, None)
            digests = {holder: pair[part] for holder, pair in digests.items()}
        return self._reconstruction.checked(owner, found, digests)


def _for_each(sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
    """Return the messages, keyed by sender and then recipient, as messages keyed by recipient and
    then sender. Recipients that are not senders are omitted."""
    return {
        name: {each: parts[name] for each, parts in sent.items() if each != name} for name in sent
    }
