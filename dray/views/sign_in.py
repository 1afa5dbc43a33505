"""Views of browsers that stay signed in."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import View


class SignedIn(View):
    """A browser that stays signed in. Its cookie, which the response sets, permits reading."""

    user: str
    write_key: str
    """A change that is authorised by the cookie needs this key in the header `X-Dray-Write-Key`."""
    expires_at: datetime
