"""The messages of a round, its errors, and what both sides know before it.

All but the masked update are JSON. A client's message says nothing of its sender: the transport
knows who sent it.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

VERSION = 2
"""Of the protocol. In version 2 clients commit to shares, so that those who lie about one are found
([reconstruction.py](reconstruction.py)). A round is of version 2 if all of its clients are. The
fields of messages that are None in version 1 are left out there."""
MAX_CLIENTS = 1000
"""In a round. Each client has a message for each other one, so their number counts squared."""
LEAST_CLIENTS = 3
"""A sum of two updates tells each of the two clients what the other one sent."""
MAX_MESSAGE_BYTES = 1 << 20
"""Of every message but the masked update, whose size is known exactly."""
KEY_BYTES = 32
SHARE_BYTES = 33
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Two shares and the tag of AES-GCM."""

ClientName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Share = Annotated[bytes, Field(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Digests = Annotated[bytes, Field(min_length=2 * KEY_BYTES, max_length=2 * KEY_BYTES)]
"""SHA-256 of a share of a masking key, and of one of a seed."""
Sealed = Annotated[bytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]


def least_clients(threshold: float, num_clients: int) -> int:
    """The number of clients, of a round with so many, that must stay to its end."""
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
    """Of each value that a client sends."""
    max_weight: Annotated[int, Field(ge=1)]
    """The largest weight of a client."""

    def least_clients(self, num_clients: int) -> int:
        """The number of clients, of so many in the roster, that must stay to the end."""
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
    """For the masks that it has in common with each other client."""


class KeyAdvertisement(PublicKeys):
    """Of a client: its keys, and the newest version that it and the server know."""

    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """None of a client of version 1."""


class RosterEntry(PublicKeys):
    name: ClientName


class Roster(MaskingMessage):
    """To every client: all clients of the round and their keys."""

    clients: Annotated[list[RosterEntry], Field(max_length=MAX_CLIENTS)]
    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """That of the round: the oldest of its clients'."""


class SharedKeys(MaskingMessage):
    """Of a client: the shares of its secrets."""

    commitment: Key
    """SHA-256 of the seed of its own mask, by which the server knows that it is put together
    right."""
    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    """By recipient: a share of its masking key and one of its seed, sealed."""
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """By client of the roster, this one too, of its shares."""


class DeliveredShares(MaskingMessage):
    """To each client: the shares for it, by sender. The senders and the client itself are those
    with whom masks are made."""

    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """By sender, of the shares for this client."""


class Survivors(MaskingMessage):
    """To each survivor: the clients whose masked updates are in the sum."""

    clients: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)]


class ConsistencyCodes(MaskingMessage):
    """Of a survivor, by recipient; and to each survivor, by sender."""

    codes: Annotated[dict[ClientName, Key], Field(max_length=MAX_CLIENTS)]
    unusable: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)] | None = None
    """Of a survivor: the clients whose shares for it can't be read, or do not fit their digests."""


class RevealedShares(MaskingMessage):
    """Of a survivor: what the server needs to remove the masks."""

    seeds: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """Of each survivor, a share of the seed of its own mask."""
    masking_keys: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """Of each client that was lost, a share of its masking key."""
    own_seed: Key | None = None
    """The seed of its own mask, which then no shares are needed for."""


def missing_package(error: ModuleNotFoundError) -> ImportError:
    """Says what to install, where a machine has `dray` alone."""
    return ImportError(
        f"secure aggregation needs the package {error.name}: pip install 'dray[client]'",
        name=error.name,
    )


class MessageRefused(Exception):
    """A message was not what the protocol allows. The round goes on without it."""

    def __init__(self, sender: str, reason: str) -> None:
        """sender: the name of the client, or "server"."""
        super().__init__(f"the message of {sender} is refused: {reason}")


class TooFewClients(Exception):
    """So many clients were lost that the round has no result."""


class WrongShares(Exception):
    """The shares of a client's secret do not give it, so the round has no result. That says nothing
    of who lied: `MaskingServer.liars` does."""

    def __init__(self, client: str, reason: str) -> None:
        """client: the one whose secret it is."""
        super().__init__(f"the secret of {client} can't be put together from its shares: {reason}")
