"""Times as the API takes them: RFC 3339."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator


def _rfc_3339(value: Any) -> Any:
    """Refuse what pydantic would also accept: seconds since 1970, dates, times without a zone."""
    if isinstance(value, str) and not re.fullmatch(
        r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", value, re.ASCII
    ):
        raise ValueError("must be a time like 2026-01-31T12:00:00Z; in an address + is %2B")
    return value


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be in the years 1 to 9999 by UTC, too") from None


Time = Annotated[datetime, BeforeValidator(_rfc_3339), AfterValidator(_in_utc)]
