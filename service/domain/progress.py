"""How far a job is. How fast it goes, and how long it still takes, is true of what runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RATES: Final = ("samples_per_s", "eta_s")


def without_rates(progress: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What stays true of the progress when its attempt does not train."""
    return {**progress, **dict.fromkeys(RATES)} if progress else None
