"""Stored job documents. A document is stored in the version in which it was submitted, and upgraded
when it is read."""

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
"""`UPCASTS[n]` converts a document from version n to version n + 1."""


class DocumentRefused(Exception):
    """Raised if a job that another release stored can't run because the validation rules have
    changed."""


def read(spec: Mapping[str, Any]) -> JobSpec:
    """Validate a stored document with the rules of this release. Raises DocumentRefused."""
    try:
        return check(upcast(spec))
    except Fault as fault:
        prefix = f"{fault.pointer} " if fault.pointer else ""
        raise DocumentRefused(
            f"this release of dray rejects the job document: {prefix}{fault.detail}"
        ) from None
    except ValueError as error:
        raise DocumentRefused(str(error)) from None


@dataclass(frozen=True)
class CheckedDocument:
    """A validated document that this release can run."""

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
"""Exclusive upper bound of seeds."""
MAX_REMEMBERED = 256
"""Maximum number of cached validations. Validations are cached because validating a document takes
longer than everything else in a claim."""


def checked(spec: Mapping[str, Any]) -> CheckedDocument:
    """Return the validated document. Documents that differ only in their seeds share a cache
    entry."""
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
    """Return a stored document for display. A document that can't be upgraded is returned
    unchanged."""
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
    """Upgrade the document to the version of this release.

    Raises ValueError if the document was written by a newer release or can't be upgraded.
    """
    document = dict(spec)
    version = int(document.get("version", 1))
    if version > target:
        raise ValueError(
            f"the job document has version {version}, but this release of dray supports only "
            f"versions up to {target}: use a newer release"
        )
    while version < target:
        step = upcasts.get(version)
        if step is None:
            raise ValueError(f"version {version} of the job document can't be upgraded")
        document = step(document)
        version += 1
        document["version"] = version
    return document
