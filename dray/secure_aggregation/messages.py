"""The messages of a round, its errors, and what both sides know before it.

All messages except the masked update are JSON. A client's message does not name its sender, which
the transport knows.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

VERSION = 2
"""Version of the protocol. In version 2 clients commit to shares, so that a client that lies about
a share is found ([reconstruction.py](reconstruction.py)). A round has version 2 if all of its
clients have. Fields that are None in version 1 are left out of its messages."""
MAX_CLIENTS = 1000
"""Most clients in a round. Each client has a message for each other client, so the number of
messages grows with the square."""
LEAST_CLIENTS = 3
"""A sum of two updates shows each of the two clients what the other one sent."""
MAX_MESSAGE_BYTES = 1 << 20
"""Largest size of a message, except the masked update, whose size is known exactly."""
KEY_BYTES = 32
SHARE_BYTES = 33
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Two shares and the tag of AES-GCM."""

ClientName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Share = Annotated[bytes, Field(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Digests = Annotated[bytes, Field(min_length=2 * KEY_BYTES, max_length=2 * KEY_BYTES)]
"""SHA-256 of a share of a masking key, and of a share of a seed."""
Sealed = Annotated[bytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]


def least_clients(threshold: float, num_clients: int) -> int:
    """The number of clients that must stay to the end of a round with `num_clients`."""
    return max(LEAST_CLIENTS, math.ceil(threshold * num_clients))


class MaskingPhase(StrEnum):
    """The server waits for one message of each client in a phase, after which it is named."""

    ADVERTISE_KEYS = "advertise_keys"
    SHARE_KEYS = "share_keys"
    MASKED_INPUT = "masked_input"
    CONSISTENCY_CHECK = "consistency_check"
    UNMASK = "unmask"
    ENDED = "ended"


class MaskingMessage(BaseModel):
    """A message as JSON, with bytes in URL-safe base64."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, sender: str) -> Self:
        """MessageRefused, with the name of the sender, if this is not such a message."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageRefused(
                sender, f"it has {len(data)} bytes, and {MAX_MESSAGE_BYTES} are allowed"
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = "/".join(str(part) for part in first["loc"])
            raise MessageRefused(sender, f"{cls.__name__} {place}: {first['msg']}") from None


class MaskingSettings(MaskingMessage):
    """The public facts of a round, which server and clients know before it."""

    session: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """A name that no other round has, such as that of the job, the attempt and the round. All keys
    and codes are bound to it."""
    num_values: Annotated[int, Field(ge=1)]
    """The length of an update."""
    threshold: Annotated[float, Field(gt=0.5, le=1.0)]
    """Share of the clients of the round that must stay to its end. Above a half, because otherwise
    a server could ask two disjoint groups for different secrets of a client."""
    limit: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    """The largest absolute value in an update. Values beyond it are clipped to it."""
    bits: Literal[32, 64]
    """Bits of each value that a client sends."""
    max_weight: Annotated[int, Field(ge=1)]
    """The largest weight of a client."""

    def least_clients(self, num_clients: int) -> int:
        """The number of clients that must stay to the end, of a roster with `num_clients`."""
        return least_clients(self.threshold, num_clients)

    @property
    def masked_bytes(self) -> int:
        """The size of the message of masked_input: the values and the weight."""
        return (self.num_values + 1) * self.bits // 8


class PublicKeys(MaskingMessage):
    """The X25519 public keys of a client for this round."""

    sealing_key: Key
    """For the shares that pass through the server, and for the codes."""
    masking_key: Key
    """For the masks that the client shares with each other client."""


class KeyAdvertisement(PublicKeys):
    """A client's message: its keys, and the newest version that it and the server know."""

    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """None for a client of version 1."""


class RosterEntry(PublicKeys):
    name: ClientName


class Roster(MaskingMessage):
    """The message to every client: all clients of the round and their keys."""

    clients: Annotated[list[RosterEntry], Field(max_length=MAX_CLIENTS)]
    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """The version of the round: the oldest version of its clients."""


class SharedKeys(MaskingMessage):
    """A client's message: the shares of its secrets."""

    commitment: Key
    """SHA-256 of the seed of its own mask, with which the server checks the reconstructed seed."""
    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    """A share of its masking key and a share of its seed, sealed, for each recipient."""
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """The digests of its shares, by client of the roster, this client included."""


class DeliveredShares(MaskingMessage):
    """The message to each client: the shares for it, by sender. The senders and the client itself
    make masks with each other."""

    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """The digests of the shares for this client, by sender."""


class Survivors(MaskingMessage):
    """The message to each survivor: the clients whose masked updates are in the sum."""

    clients: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)]


class ConsistencyCodes(MaskingMessage):
    """A survivor's message, with codes by recipient; and the message to each survivor, with codes
    by sender."""

    codes: Annotated[dict[ClientName, Key], Field(max_length=MAX_CLIENTS)]
    unusable: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)] | None = None
    """In a survivor's message: the clients whose shares for it can't be read, or do not match their
    digests."""


class RevealedShares(MaskingMessage):
    """A survivor's message: the shares that the server needs to remove the masks."""

    seeds: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """A share of the seed of each survivor's own mask."""
    masking_keys: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """A share of the masking key of each client that was lost."""
    own_seed: Key | None = None
    """The seed of the survivor's own mask. With it, no shares of that seed are needed."""


def missing_package(error: ModuleNotFoundError) -> ImportError:
    """The error that names the package to install on a machine that has `dray` alone."""
    return ImportError(
        f"secure aggregation needs the package {error.name}: pip install 'dray[client]'",
        name=error.name,
    )


class MessageRefused(Exception):
    """The protocol does not allow a message. The round goes on without it."""

    def __init__(self, sender: str, reason: str) -> None:
        """sender: the name of the client, or "server"."""
        super().__init__(f"the message of {sender} is refused: {reason}")


class TooFewClients(Exception):
    """Too many clients were lost for the round to have a result."""


class WrongShares(Exception):
    """A client's secret can't be reconstructed from its shares, so the round has no result. Any
    client may have lied: `MaskingServer.liars` names the liars."""

    def __init__(self, client: str, reason: str) -> None:
        """client: the owner of the secret."""
        super().__init__(f"the secret of {client} can't be reconstructed from its shares: {reason}")
