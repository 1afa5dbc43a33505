"""Masking of a job's secrets in all text that leaves its node: frames, errors, stacks and names.

A rank masks its reports where it can, but a script can put a secret's value into a metric name or a
tag. Therefore the node agent, through which all text leaves the node, masks the text again. The
agent learns an attempt's secrets from a file next to the spools, which contains the names of the
secrets but not their values.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, Final

from ray_workers.shared.contracts import FrameKind, RankTask
from ray_workers.shared.secret_files import Masker, SecretUnavailable, read_secrets

_NAMES: Final = ".secrets"
EXACT: Final = frozenset(
    {
        *("url", "sha256", "manifest_sha256", "id", "slices"),
        *("state", "cause", "code", "then", "file"),
    }
)
"""Fields of frames into which dray itself writes addresses, hashes, fixed words and encoded files.
A short secret can occur in a hash or in base64 by chance, and must not be masked there."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


def note_secrets(task: RankTask) -> None:
    """Record the names of the secrets that a rank is about to get, for the node's agent."""
    names = (task.spec.get("environment") or {}).get("secrets")
    path = Path(task.spool_dir).with_name(_NAMES)
    if not names or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_NAMES}.{secrets.token_hex(8)}")
    policy = task.environment_policy
    partial.write_text(json.dumps([policy.secrets_dir, names, policy.owner]))
    partial.replace(path)


class Maskers:
    """The maskers of attempts, keyed by spool folder. Each masker is created only once."""

    def __init__(self) -> None:
        self._known: dict[Path, Masker] = {}

    def of(self, spools: Path) -> Masker:
        if spools not in self._known:
            try:
                folder, names, owner = json.loads((spools / _NAMES).read_text())
            except FileNotFoundError:
                # The attempt's ranks use no secrets, or have not started yet.
                return Masker({})
            self._known[spools] = Masker(_readable(folder, names, owner))
        return self._known[spools]

    def forget(self, spools: Path) -> None:
        self._known.pop(spools, None)


def _readable(folder: str, names: list[str], owner: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found |= read_secrets(folder, [name], owner)
        except SecretUnavailable:
            continue  # a rank that can't read the secret does not have it either
    return found


def mask_frames(data: bytes, masker: Masker) -> bytes:
    """Mask the values of secrets in complete lines of a spool. Removed text is replaced by spaces,
    so that each line keeps its length, on which offsets in the spool depend."""
    if not masker.longest:
        return data
    return b"".join(_masked_line(line, masker) for line in data.splitlines(keepends=True))


def _masked_line(line: bytes, masker: Masker) -> bytes:
    nothing = b" " * (len(line) - 1) + b"\n"
    try:
        frame = json.loads(line)
        body, kind = frame["body"], frame["kind"]
    except (ValueError, KeyError, TypeError):
        return nothing  # not a frame
    masked = _masked(body, masker)
    if masked == body:
        return line
    if kind == FrameKind.ARTIFACT:
        return nothing  # the address of the artifact's file also contains the value
    text = _encode({**frame, "body": masked}).encode()
    return nothing if len(text) >= len(line) else text.ljust(len(line) - 1) + b"\n"


def _masked(value: Any, masker: Masker) -> Any:
    if isinstance(value, str):
        return masker.text(value)
    if isinstance(value, list):
        return [_masked(each, masker) for each in value]
    if isinstance(value, dict):
        return {
            masker.text(key): each if key in EXACT else _masked(each, masker)
            for key, each in value.items()
        }
    return value
