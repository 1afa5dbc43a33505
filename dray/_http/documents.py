"""The job document in the forms in which a caller may give it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # most commands need neither the document's classes nor YAML
    from dray.spec import JobSpec

Spec: TypeAlias = "JobSpec | Mapping[str, Any] | str | PathLike[str]"


def read_document(spec: Spec) -> tuple[Any, Path]:
    """The document as it is sent, without defaults, and the folder that its paths start from."""
    from dray.documents import folder_of, load_document
    from dray.spec import JobSpec

    if isinstance(spec, JobSpec):
        own = spec.model_dump(mode="json", exclude_unset=True)
        return {"version": spec.version, **own}, Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    return load_document(spec), folder_of(spec)
