"""A job's progress, of which rates and remaining time are true only while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RATES: Final = ("samples_per_s", "eta_s")


def without_rates(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The progress of a job that does not train now."""
    return {**progress, **dict.fromkeys(RATES)} if progress else None
