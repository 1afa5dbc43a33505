"""The messages and errors of a round, and its settings.

All messages except the masked update are JSON. A client's message does not name its sender, because
the transport identifies the client.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

VERSION = 2
"""Version of the protocol. In version 2, clients commit to shares, so that a client that lies about
a share can be identified ([reconstruction.py](reconstruction.py)). A round has version 2 if all its
clients support it. Fields that are None in version 1 are omitted from its messages."""
MAX_CLIENTS = 1000
"""Maximum number of clients in a round. Each client sends a message to every other client, so the
number of messages grows quadratically."""
LEAST_CLIENTS = 3
"""Minimum number of clients. With only two clients, each client could compute the update of the
other client from the sum."""
MAX_MESSAGE_BYTES = 1 << 20
"""Maximum size of any message except the masked update, which has a fixed size."""
SERVER = "server"
"""The server's name in error messages."""
KEY_BYTES = 32
SHARE_BYTES = 33
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Size of an encrypted message, which consists of two shares and the AES-GCM tag."""

ClientName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Share = Annotated[bytes, Field(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Digests = Annotated[bytes, Field(min_length=2 * KEY_BYTES, max_length=2 * KEY_BYTES)]
"""SHA-256 of a share of a masking key, followed by the SHA-256 of a share of a seed."""
Sealed = Annotated[bytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]


def least_clients(threshold: float, num_clients: int) -> int:
    """Return how many of the `num_clients` clients of a round must remain until the end of the
    round."""
    return max(LEAST_CLIENTS, math.ceil(threshold * num_clients))


class MaskingPhase(StrEnum):
    """The phases of a round. Each phase is named after the message that clients send in it."""

    ADVERTISE_KEYS = "advertise_keys"
    SHARE_KEYS = "share_keys"
    MASKED_INPUT = "masked_input"
    CONSISTENCY_CHECK = "consistency_check"
    UNMASK = "unmask"
    ENDED = "ended"


class MaskingMessage(BaseModel):
    """A JSON message, with bytes in URL-safe base64."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, sender: str) -> Self:
        """Decode a message. Raises MessageRefused, with the name of the sender, if `data` is not a
        valid message of this type."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageRefused(
                sender, f"the message has {len(data)} bytes, but the limit is {MAX_MESSAGE_BYTES}"
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            location = "/".join(str(part) for part in first["loc"])
            raise MessageRefused(sender, f"{cls.__name__} {location}: {first['msg']}") from None


class MaskingSettings(MaskingMessage):
    """The public settings of a round, which the server and the clients know before it starts."""

    session: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """A name that is unique to the round, for example built from the job, the attempt and the
    round. All keys and codes depend on this name."""
    num_values: Annotated[int, Field(ge=1)]
    """The length of an update."""
    threshold: Annotated[float, Field(gt=0.5, le=1.0)]
    """Fraction of the round's clients that must remain until its end. The fraction must be more
    than half. Otherwise, a server could ask two disjoint groups for different secrets of the same
    client."""
    limit: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    """The maximum absolute value in an update. Larger values are clipped."""
    bits: Literal[32, 64]
    """Number of bits per value that a client sends."""
    max_weight: Annotated[int, Field(ge=1)]
    """The maximum weight of a client."""

    def least_clients(self, num_clients: int) -> int:
        """Return how many of the `num_clients` clients of a roster must remain until the end of the
        round."""
        return least_clients(self.threshold, num_clients)

    @property
    def masked_bytes(self) -> int:
        """The size of the masked_input message, which consists of the values and the weight."""
        return (self.num_values + 1) * self.bits // 8


class PublicKeys(MaskingMessage):
    """A client's X25519 public keys for this round."""

    sealing_key: Key
    """Key for encrypting the shares that the server forwards, and for authentication codes."""
    masking_key: Key
    """Key for the masks that the client shares with each other client."""


class KeyAdvertisement(PublicKeys):
    """A client's message: its keys, and the newest version that the client and the server
    support."""

    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """None for a client of version 1."""


class RosterEntry(PublicKeys):
    name: ClientName


class Roster(MaskingMessage):
    """The message to every client: all clients of the round and their keys."""

    clients: Annotated[list[RosterEntry], Field(max_length=MAX_CLIENTS)]
    version: Annotated[int, Field(ge=2, le=2**31)] | None = None
    """The version of the round, which is the oldest version of its clients."""


class SharedKeys(MaskingMessage):
    """A client's message: the shares of its secrets."""

    commitment: Key
    """Commitment to the seed of the client's private mask, with which the server verifies the
    reconstructed seed."""
    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    """For each recipient, an encrypted pair: a share of the client's masking key, and a share of
    its seed."""
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """The digests of the client's shares, keyed by recipient. Recipients are all clients in the
    roster, including the client itself."""


class DeliveredShares(MaskingMessage):
    """The message to each client: the shares for this client, keyed by sender. The client and each
    sender share a mask, which they use in their updates."""

    shares: Annotated[dict[ClientName, Sealed], Field(max_length=MAX_CLIENTS)]
    digests: Annotated[dict[ClientName, Digests], Field(max_length=MAX_CLIENTS)] | None = None
    """The digests of this client's shares, keyed by sender."""


class Survivors(MaskingMessage):
    """The message to each survivor: the clients whose masked updates are in the sum."""

    clients: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)]


class ConsistencyCodes(MaskingMessage):
    """A survivor's message, with codes keyed by recipient, or the message to each survivor, with
    codes keyed by sender."""

    codes: Annotated[dict[ClientName, Key], Field(max_length=MAX_CLIENTS)]
    unusable: Annotated[list[ClientName], Field(max_length=MAX_CLIENTS)] | None = None
    """In a survivor's message: the clients whose shares can't be decrypted or do not match their
    digests."""


class RevealedShares(MaskingMessage):
    """A survivor's message: the shares that the server needs to remove the masks."""

    seeds: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """A share of the seed of each survivor's private mask."""
    masking_keys: Annotated[dict[ClientName, Share], Field(max_length=MAX_CLIENTS)]
    """A share of the masking key of each lost client."""
    own_seed: Key | None = None
    """The seed of the survivor's private mask. If this seed is given, its shares are not needed."""


def missing_package(error: ModuleNotFoundError) -> ImportError:
    """Return an error that names the package to install, for a machine on which only `dray` is
    installed."""
    return ImportError(
        f"secure aggregation requires the package {error.name}: pip install 'dray[client]'",
        name=error.name,
    )


class MessageRefused(Exception):
    """A message is not allowed by the protocol. The round continues without the message."""

    def __init__(self, sender: str, reason: str) -> None:
        """sender: the name of the client, or `SERVER`."""
        who = "the server" if sender == SERVER else f"client {sender}"
        super().__init__(f"the message from {who} is refused: {reason}")


class TooFewClients(Exception):
    """The round has no result because too many clients were lost."""


class WrongShares(Exception):
    """The round has no result because a client's secret can't be reconstructed from its shares. Any
    client might have lied: `MaskingServer.liars` names the liars."""

    def __init__(self, client: str, reason: str) -> None:
        """client: the owner of the secret."""
        super().__init__(
            f"the secret of client {client} can't be reconstructed from its shares: {reason}"
        )
