"""ETags and conditional requests (RFC 9110, section 13), which avoid sending an unchanged response
again. Also checks whether a response may be compressed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from fastapi import Request, Response

from api.problems import Refused
from dray.views import View

REVALIDATE = "private, no-cache"
"""A cache may store a response only for the caller that received it, and must revalidate the
response before each use."""

_REVISION = re.compile(r'"([0-9]{1,18})(?:-[0-9a-f]{32})?"')
_CODING = re.compile(r"([a-z0-9-]+|\*)(?:[ \t]*;[ \t]*q=([01](?:\.[0-9]{0,3})?))?")
_TAGS = re.compile(r'(?:W/)?"[^"]*"')


def etag_of(body: bytes) -> str:
    """Return a strong ETag. Hashing a response is cheap (microseconds) compared with creating the
    response (a transaction)."""
    return f'"{_hash(body)}"'


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def is_known(request: Request, etag: str) -> bool:
    """Whether the caller's `If-None-Match` contains this ETag (weak comparison)."""
    header = request.headers.get("if-none-match")
    if header is None:
        return False
    tags = {tag.removeprefix("W/") for tag in _TAGS.findall(header)}
    return header.strip() == "*" or etag.removeprefix("W/") in tags


def accepts_gzip(request: Request) -> bool:
    """Whether the caller accepts content compressed with gzip (RFC 9110, 12.5.3)."""
    weights: dict[str, float] = {}
    for coding in request.headers.get("accept-encoding", "").lower().split(","):
        match = _CODING.fullmatch(coding.strip())
        if match is not None:
            weights[match[1]] = float(match[2] or 1)
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0))) > 0


def revision_tag(revision: int, body: bytes | None = None) -> dict[str, str]:
    """Return the ETag of a revision, which a caller sends back in `If-Match` to change only that
    revision. `body` is the response if the response can change without a new revision."""
    return {"ETag": f'"{revision}"' if body is None else f'"{revision}-{_hash(body)}"'}


def wanted_revision(if_match: str | None) -> int | None:
    """Return the revision in `If-Match`, or None if the request may change any revision.

    Raises Refused for a malformed ETag, because a request whose ETag is ignored could change a
    version that the caller has not read.
    """
    header = (if_match or "*").strip()
    if header == "*":
        return None
    match = _REVISION.fullmatch(header)
    if match is None:
        detail = f"If-Match is {header[:100]!r}, which is not an ETag of this resource"
        raise Refused("malformed_request", detail, hint='an ETag looks like "3"')
    return int(match[1])


def not_modified(etag: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        status_code=304, headers={"ETag": etag, "Cache-Control": REVALIDATE, **(headers or {})}
    )


def answer(request: Request, view: View, headers: Mapping[str, str] | None = None) -> Response:
    """Return the view as JSON with its ETag, or 304 if the caller already has this version.

    The view is serialised without validation, since it was validated when it was created.
    """
    return answer_json(request, view.model_dump_json().encode(), headers)


def answer_json(
    request: Request, body: bytes, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the serialised view with its ETag, or 304; see `answer`."""
    etag = (headers or {}).get("ETag") or etag_of(body)
    if is_known(request, etag):
        return not_modified(etag, headers)
    return Response(
        body,
        media_type="application/json",
        headers={"ETag": etag, "Cache-Control": REVALIDATE, **(headers or {})},
    )


def fresh(view: View, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the view as the JSON response to a write request. Caches must not store it."""
    return Response(
        view.model_dump_json(),
        status_code=status,
        media_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )
