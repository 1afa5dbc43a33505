"""The client's side of a round."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping

from dray.secure_aggregation import keys
from dray.secure_aggregation.fixed_point import FixedPoint, Values
from dray.secure_aggregation.keys import KeyPair, joined
from dray.secure_aggregation.messages import (
    KEY_BYTES,
    SERVER,
    SHARE_BYTES,
    VERSION,
    ConsistencyCodes,
    DeliveredShares,
    KeyAdvertisement,
    MaskingMessage,
    MaskingPhase,
    MaskingSettings,
    MessageRefused,
    RevealedShares,
    Roster,
    RosterEntry,
    SharedKeys,
    Survivors,
)


class MaskingClient:
    """One client in one round. Only this object has the client's secrets. Therefore, a client that
    restarts can't continue the round, but it can take part in the next round.

    If the protocol does not allow a message from the server, MessageRefused is raised and the
    object is unchanged.
    """

    def __init__(self, name: str, settings: MaskingSettings, version: int = VERSION) -> None:
        """name: this client's name in the server's roster. version: the server's protocol
        version."""
        self._name = name
        self._version = min(version, VERSION)
        """The version of the round. Until the roster is known, the newest version that both the
        client and the server support."""
        self._settings = settings
        self.phase = MaskingPhase.ADVERTISE_KEYS
        """The phase of the message that `answer` returns next."""
        self._sealing = KeyPair()
        self._masking = KeyPair()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self._update: tuple[Values, int] | None = None
        # The other clients, the positions of all clients, and the round's parameters are set when
        # the client receives the roster.
        self._others: dict[str, RosterEntry] = {}
        self._indices: dict[str, int] = {}
        self._least = 0
        self._transcript = b""
        self._encoding: FixedPoint | None = None
        self._own_shares = b""
        # The following attributes are set in later phases.
        self._delivered: Mapping[str, bytes] = {}
        self._digests: Mapping[str, bytes] = {}
        self._usable: dict[str, bytes] = {}
        """The shares of a key and a seed, keyed by owner."""
        self._survivors: tuple[str, ...] = ()
        self._confirmed = b""

    def provide(self, values: Values, weight: int = 1) -> None:
        """Set the update, an array of shape (num_values,) with floats of any width, and its weight
        in the sum. The server learns neither. Must be called before `answer` is called in the
        masked_input phase.

        Raises ValueError if the values have a different length or are not finite, or if the weight
        is not between 1 and `settings.max_weight`.
        """
        FixedPoint.check(values, self._settings.num_values)
        if not 1 <= weight <= self._settings.max_weight:
            raise ValueError(
                f"the weight is {weight}, but must be between 1 and {self._settings.max_weight}"
            )
        self._update = values, weight

    def answer(self, message: bytes = b"") -> bytes:
        """Return the message to the server in this phase. message: the server's message in this
        phase; empty in the first phase. If sending fails, send the same message again, because a
        client can send only one message in each phase."""
        match self.phase:
            case MaskingPhase.ADVERTISE_KEYS:
                answer = self._advertise_keys()
            case MaskingPhase.SHARE_KEYS:
                answer = self._share_keys(message)
            case MaskingPhase.MASKED_INPUT:
                answer = self._masked_input(message)
            case MaskingPhase.CONSISTENCY_CHECK:
                answer = self._consistency_codes(message)
            case MaskingPhase.UNMASK:
                answer = self._reveal(message)
            case MaskingPhase.ENDED:
                raise MessageRefused(
                    SERVER, "the client has already sent its messages in all phases of the round"
                )
        phases = list(MaskingPhase)
        self.phase = phases[phases.index(self.phase) + 1]
        return answer

    def _advertise_keys(self) -> bytes:
        sealing, masking = self._sealing.public, self._masking.public
        version = None if self._version == 1 else self._version
        return KeyAdvertisement(
            sealing_key=sealing, masking_key=masking, version=version
        ).to_bytes()

    def _share_keys(self, message: bytes) -> bytes:
        self._take_roster(message)
        num_clients = len(self._indices)
        key_shares = keys.split(self._masking.private, self._least, num_clients)
        seed_shares = keys.split(self._seed, self._least, num_clients)
        pairs = dict(zip(self._indices, map(bytes.__add__, key_shares, seed_shares), strict=True))
        digests = {
            name: keys.digest_of(pair[:SHARE_BYTES]) + keys.digest_of(pair[SHARE_BYTES:])
            for name, pair in pairs.items()
        }
        self._own_shares = pairs.pop(self._name)
        sealed = {
            name: keys.seal(self._sealing_key(self._name, name), pair)
            for name, pair in pairs.items()
        }
        commitment = keys.commitment_of(self._seed)
        sent = SharedKeys(commitment=commitment, shares=sealed, digests=digests)
        return self._as_of_the_round(sent, "digests")

    def _as_of_the_round(self, message: MaskingMessage, *fields: str) -> bytes:
        """Return the encoded message. In a version 1 round, omit `fields`, which version 1 does not
        have."""
        if self._has_digests:
            return message.to_bytes()
        return message.model_copy(update=dict.fromkeys(fields)).to_bytes()

    @property
    def _has_digests(self) -> bool:
        return self._version > 1

    def _take_roster(self, message: bytes) -> None:
        roster = Roster.from_bytes(message, SERVER)
        entries, version = roster.clients, roster.version or 1
        if version > self._version:
            raise MessageRefused(
                SERVER,
                f"the round uses protocol version {version}, which this client does not support",
            )
        names = [entry.name for entry in entries]
        every_key = [key for entry in entries for key in (entry.sealing_key, entry.masking_key)]
        if len(set(names)) < len(names) or len(set(every_key)) < len(every_key):
            raise MessageRefused(SERVER, "the roster contains a duplicate client or key")
        others = {entry.name: entry for entry in entries}
        own = others.pop(self._name, None)
        public = self._sealing.public, self._masking.public
        if own is None or (own.sealing_key, own.masking_key) != public:
            raise MessageRefused(SERVER, f"the roster does not contain the keys of {self._name}")
        least = self._settings.least_clients(len(names))
        self._check_enough(names, least, "are in the roster")
        try:
            encoding = FixedPoint.of(self._settings, len(names))
        except ValueError as error:
            raise MessageRefused(SERVER, str(error)) from None
        self._others, self._least, self._encoding = others, least, encoding
        self._version = version
        self._indices = {name: index for index, name in enumerate(names, 1)}
        self._transcript = keys.transcript_of(self._settings, message)

    def _masked_input(self, message: bytes) -> bytes:
        if self._update is None:
            raise RuntimeError(
                "in the phase masked_input, call provide() with the update before answer()"
            )
        parsed = DeliveredShares.from_bytes(message, SERVER)
        delivered, digests = parsed.shares, parsed.digests or {}
        self._check_known(delivered, "shares")
        if self._has_digests and digests.keys() != delivered.keys():
            raise MessageRefused(
                SERVER, "the digests in the message do not match the shares in the message"
            )
        self._check_enough([*delivered, self._name], self._least, "have shared their keys")
        assert self._encoding is not None
        values, weight = self._update
        masked = self._encoding.encode(values, weight)
        self._encoding.add_mask(masked, self._seed, 1)
        for name in delivered:
            seed = self._masking.agree(self._others[name].masking_key, keys.MASKS, self._transcript)
            comes_first = self._indices[self._name] < self._indices[name]
            self._encoding.add_mask(masked, seed, 1 if comes_first else -1)
        self._delivered, self._digests, self._update = delivered, digests, None
        return masked.tobytes()

    def _consistency_codes(self, message: bytes) -> bytes:
        survivors = Survivors.from_bytes(message, SERVER).clients
        if self._name not in survivors or len(set(survivors)) < len(survivors):
            raise MessageRefused(
                SERVER, f"{self._name} must be listed exactly once among the survivors"
            )
        if not {*survivors} <= {*self._delivered, self._name}:
            raise MessageRefused(
                SERVER, "the message lists a survivor that has not shared its keys"
            )
        self._check_enough(survivors, self._least, "have survived")
        self._survivors = tuple(survivors)
        masked = sorted([*self._delivered, self._name])
        self._confirmed = joined(
            *(joined(*(name.encode() for name in names)) for names in (masked, sorted(survivors)))
        )
        self._usable = self._unsealed()
        unusable = sorted(self._delivered.keys() - self._usable.keys())
        codes = {name: self._code(self._name, name) for name in survivors if name != self._name}
        sent = ConsistencyCodes(codes=codes, unusable=unusable)
        return self._as_of_the_round(sent, "unusable")

    def _unsealed(self) -> dict[str, bytes]:
        """Return the pairs of shares from other clients, keyed by client. Pairs that can't be
        decrypted or, in version 2, do not match their digests are omitted."""
        found = {}
        for name, sealed in self._delivered.items():
            pair = keys.unseal(self._sealing_key(name, self._name), sealed)
            if pair is None:
                continue
            digests = keys.digest_of(pair[:SHARE_BYTES]) + keys.digest_of(pair[SHARE_BYTES:])
            if not self._has_digests or digests == self._digests[name]:
                found[name] = pair
        return found

    def _reveal(self, message: bytes) -> bytes:
        codes = ConsistencyCodes.from_bytes(message, SERVER).codes
        self._check_known(codes, "codes")
        # Ignore incorrect codes. Otherwise, a single client could abort the round by sending
        # incorrect codes.
        right = [name for name, code in codes.items() if self._confirms(name, code)]
        found = "have confirmed the same survivors"
        self._check_enough([*right, self._name], self._least, found)
        pairs = {self._name: self._own_shares, **self._usable}
        seeds = {name: pairs[name][SHARE_BYTES:] for name in self._survivors if name in pairs}
        lost = pairs.keys() - {*self._survivors}
        masking_keys = {name: pairs[name][:SHARE_BYTES] for name in lost}
        sent = RevealedShares(seeds=seeds, masking_keys=masking_keys, own_seed=self._seed)
        return self._as_of_the_round(sent, "own_seed")

    def _confirms(self, name: str, code: bytes) -> bool:
        """Return whether the survivor `name` has received the same list of survivors as this
        client."""
        return name in self._survivors and hmac.compare_digest(code, self._code(name, name))

    def _code(self, sender: str, other: str) -> bytes:
        """Return the code with which one client proves to another client that it received the same
        list of masks and survivors. The two clients are this client and `other`; `sender` names the
        client that sends the code."""
        key = self._sealing.agree(self._others[other].sealing_key, b"codes", self._transcript)
        return hmac.digest(key, joined(sender.encode(), self._confirmed), "sha256")

    def _sealing_key(self, sender: str, recipient: str) -> bytes:
        """Return the key that encrypts shares from sender to recipient. Each direction has a
        different key."""
        other = recipient if sender == self._name else sender
        way = sender.encode(), recipient.encode()
        return self._sealing.agree(
            self._others[other].sealing_key, b"shares", self._transcript, *way
        )

    def _check_known(self, names: Iterable[str], things: str) -> None:
        if unknown := sorted({*names} - self._others.keys()):
            raise MessageRefused(
                SERVER,
                f"the message contains {things} from {unknown[0]}, which is not in the roster",
            )

    def _check_enough(self, names: list[str], least: int, found: str) -> None:
        if len(names) < least:
            raise MessageRefused(
                SERVER,
                f"only {len(names)} clients {found}, but {least} are required to keep "
                "updates hidden",
            )
