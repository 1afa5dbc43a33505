"""The files of a round with clients outside of the cluster, in the job's storage.

The aggregating rank writes the model of a round. The service writes what clients send: the parts of
an update, and then a JSON file with its `SentUpdate`, without which the update is incomplete. The
name of a round identifies its weights, so an update applies only to those weights, whichever
attempt of the job published them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

PART_BYTES = 4 << 20
"""The size of each part of an update; the last part may be smaller."""
ELEMENT_BYTES = 4
"""Number of bytes per element of an update. An update consists of little-endian float32 values
without a header."""
FORM = "form.json"
MODEL = "model.safetensors"
UPDATES = "updates"
_PARTS = "parts"
UPDATE = "update"
"""The message that a round expects from clients, except in the phases of secure aggregation."""


def rounds_prefix(job_id: str) -> str:
    """Return the path of a job's rounds below the storage URL. All attempts of the job share this
    path."""
    return f"jobs/{job_id}/rounds"


def round_name(number: int, model_sha256: str) -> str:
    """Return the name of a round, which is also the name of its folder."""
    return f"{number:012d}-{model_sha256[:16]}"


def number_of(name: str) -> int | None:
    """Return the number in the name of a round; None if it is not the name of a round."""
    match = re.fullmatch(r"([0-9]{12})-[0-9a-f]{16}", name)
    return None if match is None else int(match[1])


def update_path(client: int) -> str:
    return f"{UPDATES}/{client:05d}.json"


def part_path(client: int, part: int) -> str:
    return f"{_PARTS}/{client:05d}/{part:05d}"


def message_path(phase: str, client: int) -> str:
    """Return the path of a client's message in a phase of secure aggregation."""
    return f"messages/{phase}/{client:05d}"


def answers_path(phase: str) -> str:
    return f"answers/{phase}"


def answer_path(phase: str, client: int) -> str:
    return f"{answers_path(phase)}/{client:05d}"


def num_parts(num_bytes: int) -> int:
    return -(-num_bytes // PART_BYTES)


def part_size(num_bytes: int, part: int) -> int:
    return min(PART_BYTES, num_bytes - part * PART_BYTES)


@dataclass(frozen=True)
class SentUpdate:
    """A client's description of the update it has sent."""

    client: int
    sha256: str
    """SHA-256 of the concatenated parts."""
    num_samples: int
    """Number of samples on which the client trained."""
    num_steps: int
    loss: float
    """Mean loss during training."""
    num_val_samples: int
    val_loss: float | None
    """Mean loss of the round's model, before training, over the client's validation samples; None
    if the client has none."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Parse the output of `to_json`. Raises ValueError if `content` is invalid."""
        try:
            parsed: Mapping[str, Any] = json.loads(content)
            sent = cls(**parsed)
            whole = (sent.client, sent.num_samples, sent.num_steps, sent.num_val_samples)
            if not all(type(one) is int and one >= 0 for one in whole) or sent.num_samples == 0:
                raise ValueError(
                    "client, num_samples, num_steps and num_val_samples must be non-negative "
                    "integers, and num_samples must not be 0"
                )
            losses = [sent.loss, *([] if sent.val_loss is None else [sent.val_loss])]
            if not all(math.isfinite(one) for one in losses):
                raise ValueError("a loss is not finite")
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"the description of the update is invalid: {error}") from error
        return sent
