"""Encode situations and decisions as bytes for the database, and decode them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.domain.scheduling import policy
from service.domain.scheduling.outlook.situation import Situation

_SITUATION = TypeAdapter(Situation)
_KINDS: tuple[type[policy.Decision], ...] = (
    policy.Start,
    policy.Wait,
    policy.Impossible,
    policy.Grow,
    policy.Stay,
    policy.Preempt,
    policy.Shrink,
)
_DECISIONS = {kind.__name__: TypeAdapter[policy.Decision](kind) for kind in _KINDS}


class Unreadable(ValueError):
    """The data was written by another release."""


def encode(situation: Situation) -> bytes:
    return _packed(_as_json(situation))


def decode(data: bytes) -> Situation:
    """Decode a situation. Raises Unreadable if another release wrote the data."""
    return _situation(_unpacked(data))


def encode_record(
    situation: Situation, decisions: Sequence[policy.Decision], now: datetime
) -> bytes:
    """Encode a round: the policy's input, its decisions, and the time."""
    return _packed(
        {
            "now": now.isoformat(),
            "situation": _as_json(situation),
            "decisions": [_as_document(decision) for decision in decisions],
        }
    )


def _as_document(decision: policy.Decision) -> dict[str, Any]:
    kind = type(decision).__name__
    return {"kind": kind, **_DECISIONS[kind].dump_python(decision)}


def decode_record(data: bytes) -> tuple[Situation, list[policy.Decision], datetime]:
    """Decode a round. Raises Unreadable if the round was written by another release."""
    found = _unpacked(data)
    try:
        decisions = [
            _DECISIONS[each.pop("kind")].validate_python(each) for each in found["decisions"]
        ]
        return _situation(found["situation"]), decisions, datetime.fromisoformat(found["now"])
    except (ValidationError, KeyError, TypeError) as error:
        raise Unreadable(f"the record can't be read: {error}") from error


def _as_json(situation: Situation) -> dict[str, Any]:
    # Store `used_s` as a list, because its keys are pairs, which JSON doesn't allow as keys.
    used_s = [[*account, seconds] for account, seconds in situation.snapshot.used_s.items()]
    bare = replace(situation, snapshot=replace(situation.snapshot, used_s={}))
    document = _SITUATION.dump_python(bare, mode="json", exclude_defaults=True)
    return {"document": document, "used_s": used_s}


def _situation(found: Mapping[str, Any]) -> Situation:
    try:
        situation = _SITUATION.validate_python(found["document"])
        used_s = {(queue, owner): seconds for queue, owner, seconds in found["used_s"]}
    except (ValidationError, KeyError, ValueError) as error:
        raise Unreadable(f"the situation can't be read: {error}") from error
    return replace(situation, snapshot=replace(situation.snapshot, used_s=used_s))


def _packed(document: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":"), default=str).encode())


def _unpacked(data: bytes) -> Any:
    try:
        return json.loads(zlib.decompress(data))
    except (zlib.error, ValueError) as error:
        raise Unreadable(f"the data is not compressed JSON: {error}") from error
