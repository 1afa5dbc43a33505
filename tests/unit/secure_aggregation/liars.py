"""Clients that lie about shares, in every way that the messages of a round allow."""

from __future__ import annotations

import random
from collections.abc import Iterable

from dray.secure_aggregation import keys
from dray.secure_aggregation.client import MaskingClient
from dray.secure_aggregation.messages import (
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    ConsistencyCodes,
    MaskingPhase,
    MaskingSettings,
    RevealedShares,
    SharedKeys,
)

AS_OWNER = ("commitment", "garbage", "unfitting", "digests")
AS_HOLDER = ("shares", "accusations", "own seed", "silence", "codes")


class Liar(MaskingClient):
    """Changes its messages according to its lies, each about a random part of the other clients."""

    def __init__(
        self,
        name: str,
        settings: MaskingSettings,
        lies: Iterable[str],
        rng: random.Random,
        share: float,
        version: int = 2,
    ) -> None:
        """share: of the other clients, about whom each lie is."""
        super().__init__(name, settings, version)
        self.lies = set(lies)
        self._rng = rng
        self._part = share

    def answer(self, message: bytes = b"") -> bytes:
        phase = self.phase
        right = super().answer(message)
        match phase:
            case MaskingPhase.SHARE_KEYS:
                return self._lie_as_owner(SharedKeys.from_bytes(right, "")).to_bytes()
            case MaskingPhase.CONSISTENCY_CHECK:
                return self._lie_in_codes(ConsistencyCodes.from_bytes(right, "")).to_bytes()
            case MaskingPhase.UNMASK:
                return self._lie_as_holder(RevealedShares.from_bytes(right, "")).to_bytes()
            case _:
                return right

    def _some(self, names: Iterable[str]) -> list[str]:
        return [name for name in sorted(names) if self._rng.random() < self._part]

    def _lie_as_owner(self, right: SharedKeys) -> SharedKeys:
        sent, digests = dict(right.shares), dict(right.digests or {})
        for name in self._some(sent) if "garbage" in self.lies else ():
            sent[name] = self._rng.randbytes(SEALED_BYTES)
        for name in self._some(sent) if "unfitting" in self.lies else ():
            pair = b"\0" + self._rng.randbytes(SHARE_BYTES - 1)
            pair += b"\0" + self._rng.randbytes(SHARE_BYTES - 1)
            sent[name] = keys.seal(self._sealing_key(self._name, name), pair)
            digests[name] = keys.digest_of(pair[:SHARE_BYTES]) + keys.digest_of(pair[SHARE_BYTES:])
        for name in self._some(digests) if "digests" in self.lies else ():
            digests[name] = self._rng.randbytes(2 * KEY_BYTES)
        changes: dict[str, object] = {"shares": sent}
        if right.digests is not None:
            changes["digests"] = digests
        if "commitment" in self.lies:
            changes["commitment"] = self._rng.randbytes(KEY_BYTES)
        return right.model_copy(update=changes)

    def _lie_in_codes(self, right: ConsistencyCodes) -> ConsistencyCodes:
        codes = dict(right.codes)
        for name in self._some(codes) if "codes" in self.lies else ():
            codes[name] = self._rng.randbytes(KEY_BYTES)
        unusable = right.unusable
        if "accusations" in self.lies and unusable is not None:
            unusable = self._some({*unusable, *self._delivered})
        return right.model_copy(update={"codes": codes, "unusable": unusable})

    def _lie_as_holder(self, right: RevealedShares) -> RevealedShares:
        changes: dict[str, object] = {}
        for secrets in ("seeds", "masking_keys"):
            found = dict(getattr(right, secrets))
            for name in self._some(found) if "shares" in self.lies else ():
                found[name] = b"\0" + self._rng.randbytes(SHARE_BYTES - 1)
            for name in self._some(found) if "silence" in self.lies else ():
                del found[name]
            changes[secrets] = found
        if "own seed" in self.lies and right.own_seed is not None:
            changes["own_seed"] = self._rng.randbytes(KEY_BYTES)
        return right.model_copy(update=changes)
