"""Drops from a job's stored progress what is true only while it runs: rates, remaining time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RATES: Final = ("samples_per_s", "eta_s")


def without_rates(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The progress of a job that does not train now."""
    return {**progress, **dict.fromkeys(RATES)} if progress else None
