"""The request body that changes an experiment."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dray.spec.fields import Document, JobId

MAX_EXPERIMENT_NOTES = 65_536
"""Maximum number of characters of an experiment's notes."""
MAX_PINNED = 20
"""Maximum number of pinned jobs of an experiment."""
MAX_LAYOUT_BYTES = 64 * 1024
"""Maximum size of a layout as JSON in UTF-8, without white space."""


def _small_layout(layout: dict[str, Any]) -> dict[str, Any]:
    try:
        text = json.dumps(layout, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ValueError("must not contain NaN or infinite numbers") from None
    if (size := len(text.encode())) > MAX_LAYOUT_BYTES:
        raise ValueError(f"is {size:,} bytes of JSON: at most {MAX_LAYOUT_BYTES:,} are allowed")
    return layout


class ExperimentRequest(Document):
    """Change the stored properties of an experiment. Omitted fields remain unchanged."""

    baseline: JobId | None = None
    """Id of the job with which the other jobs of the experiment are compared; null to have no
    baseline."""
    notes: Annotated[str, StringConstraints(max_length=MAX_EXPERIMENT_NOTES)] = ""
    """Markdown that replaces the current notes; an empty string removes them."""
    pinned: Annotated[tuple[JobId, ...], Field(max_length=MAX_PINNED)] = ()
    """Ids of the experiment's jobs that come first in its lists, in this order. Replaces the
    current list."""
    layout: Annotated[dict[str, Any], AfterValidator(_small_layout)] = Field(default={})
    """The charts of the experiment's web page, as an object that only the web page interprets.
    Replaces the current layout."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"specify at least one of {', '.join(type(self).model_fields)}")
        if len(set(self.pinned)) < len(self.pinned):
            raise ValueError("`pinned` contains a job twice")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that were given."""
        return self.model_dump(mode="json", exclude_unset=True)
