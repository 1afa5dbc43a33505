"""Stored job documents keep the version they were written in and are brought up when read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from dray.input.validation import Fault, check
from dray.spec import SPEC_VERSION, JobSpec

Document = dict[str, Any]

UPCASTS: Mapping[int, Callable[[Document], Document]] = {}
"""`UPCASTS[n]` turns a document of version n into one of version n + 1."""


class DocumentRefused(Exception):
    """This program can't run a job that was stored by another release: its rules are others."""


def read(spec: Mapping[str, Any]) -> JobSpec:
    """A stored document, by the rules of this program. DocumentRefused says what it refuses."""
    try:
        return check(upcast(spec))
    except Fault as fault:
        place = f"{fault.pointer} " if fault.pointer else ""
        raise DocumentRefused(f"this release of dray refuses it: {place}{fault.detail}") from None
    except ValueError as error:
        raise DocumentRefused(str(error)) from None


@dataclass(frozen=True)
class CheckedDocument:
    """A document that this program can run."""

    spec: JobSpec
    document: Mapping[str, Any]
    """`spec` as JSON."""

    @classmethod
    def of(cls, spec: JobSpec) -> CheckedDocument:
        return cls(spec, spec.model_dump(mode="json"))

    def with_seed(self, seed: int) -> CheckedDocument:
        train = self.spec.train.model_copy(update={"seed": seed})
        document = {**self.document, "train": {**self.document["train"], "seed": seed}}
        return CheckedDocument(self.spec.model_copy(update={"train": train}), document)


MAX_SEED = 2**63
"""Seeds are below it."""
MAX_REMEMBERED = 256
"""Documents whose check is remembered: it takes longer than all else of a claim."""


def checked(spec: Mapping[str, Any]) -> CheckedDocument:
    """As `read`, and remembers: jobs of an array differ by their seeds alone."""
    train = spec.get("train")
    seed = train.get("seed") if isinstance(train, Mapping) else None
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        return _checked(to_json(spec))
    unseeded = {**spec, "train": {**spec["train"], "seed": 0}}
    return _checked(to_json(unseeded)).with_seed(seed)


@functools.lru_cache(MAX_REMEMBERED)
def _checked(text: bytes) -> CheckedDocument:
    return CheckedDocument.of(read(from_json(text)))


def shown(spec: Mapping[str, Any]) -> Document:
    """A stored document for people to read; as it is, if there is no way up."""
    try:
        return upcast(spec)
    except ValueError:
        return dict(spec)


def upcast(
    spec: Mapping[str, Any],
    *,
    upcasts: Mapping[int, Callable[[Document], Document]] = UPCASTS,
    target: int = SPEC_VERSION,
) -> Document:
    """The same document in the version of this program.

    Raises ValueError for one that a newer program wrote, or that has no way up.
    """
    document = dict(spec)
    version = int(document.get("version", 1))
    if version > target:
        raise ValueError(
            f"the job document has version {version}, but this dray reads up to version "
            f"{target}: run the newer dray that wrote it"
        )
    while version < target:
        step = upcasts.get(version)
        if step is None:
            raise ValueError(f"there is no way from version {version} of the job document")
        document = step(document)
        version += 1
        document["version"] = version
    return document
