"""Reads the body of a request up to a limit, parses it strictly, checks it, and hashes it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from api.problems import Refused
from dray.documents import parse_yaml, position_of
from dray.errors import SpecError
from dray.input import validation
from dray.input.validation import TOO_DEEP, Fault
from dray.spec import JobSpec

D = TypeVar("D", bound=BaseModel)
SMALL_BYTES = 64 << 10
"""Maximum size of a body that is parsed in the event loop. Larger bodies, which ordinary jobs don't
need, are parsed in a thread, so that other requests don't wait."""
YAML = "application/yaml"
MAX_YAML_BYTES = 256 << 10
"""Maximum size of a YAML document, which takes much longer to parse than JSON."""
SWEEP = b'"sweep"'
"""A body that contains this key is also parsed in a thread, because each value of a sweep is
checked."""


async def read_as(
    kind: type[D],
    request: Request,
    limit_bytes: int,
    *,
    optional: bool = False,
    as_yaml: bool = False,
) -> tuple[D, dict[str, Any]]:
    """Return the body as an instance of `kind`, together with the parsed JSON. With `optional`, the
    body can be empty; with `as_yaml`, it can be YAML.

    Raises Refused if the body is too large, not JSON, ambiguous JSON, or not a valid `kind`.
    """
    body = await _read(request, limit_bytes)
    if optional and not body:
        return kind(), {}
    if as_yaml and _is_yaml(request):
        return await asyncio.to_thread(_of_yaml, body, partial(validation.check_as, kind))
    _check_content_type(request.headers.get("content-type", ""))
    document = parse(body)
    return check_as(kind, document), document


async def read_spec(request: Request, limit_bytes: int) -> tuple[JobSpec, str]:
    """Return the job that the body describes, and its fingerprint.

    The body is JSON, or YAML in the form that `dray submit` reads. Raises Refused if the body is
    too large, neither JSON nor YAML, ambiguous, or not a valid job.
    """
    if _is_yaml(request):
        body = await _read(request, limit_bytes)
        spec, document = await asyncio.to_thread(_of_yaml, body, validation.check)
        return spec, fingerprint(document)
    _check_content_type(request.headers.get("content-type", ""))
    body = await _read(request, limit_bytes)
    if len(body) <= SMALL_BYTES and SWEEP not in body:
        return _understand(body)
    return await asyncio.to_thread(_understand, body)


async def read_bytes(request: Request, limit_bytes: int, kinds: Sequence[str]) -> tuple[bytes, str]:
    """Return the raw body, and its media type, which is one of `kinds`.

    Raises Refused if the body is too large or has the wrong type.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind not in kinds:
        detail = f"the content type is {given!r}, not {' or '.join(kinds)}"
        raise Refused("unsupported_media_type", detail)
    return await _read(request, limit_bytes), kind


def _understand(body: bytes) -> tuple[JobSpec, str]:
    document = parse(body)
    return check(document), fingerprint(document)


def _is_yaml(request: Request) -> bool:
    given = request.headers.get("content-type", "")
    return given.partition(";")[0].strip().lower() == YAML


def _of_yaml(body: bytes, check: Callable[[dict[str, Any]], D]) -> tuple[D, dict[str, Any]]:
    """Return the checked document and its plain data. The detail of a refusal names the line."""
    if len(body) > MAX_YAML_BYTES:
        detail = f"the document is larger than {MAX_YAML_BYTES} bytes"
        raise Refused("body_too_large", detail, hint="send larger documents as JSON")
    try:
        text = body.decode("utf-8")
        document = parse_yaml(text, source="the document")
    except UnicodeDecodeError:
        raise Refused("malformed_request", "the body is not UTF-8 text") from None
    except SpecError as error:
        raise Refused("malformed_request", _with_line_in_brackets(str(error))) from None
    if not isinstance(document, dict):
        raise Refused("malformed_request", "the body is YAML, but not a mapping")
    try:
        validation.check_values(document)
        return check(document), document
    except Fault as fault:
        at = position_of(text, fault.pointer or "")
        where = f" (line {at[0]}, column {at[1]})" if at and fault.pointer else ""
        detail = f"{fault.detail}{where}"
        raise Refused(fault.code, detail, fault.pointer, fault.hint) from None


def _with_line_in_brackets(message: str) -> str:
    found = re.fullmatch(r"the document, (line \d+, column \d+): (.*)", message, re.DOTALL)
    return f"the document is not YAML: {found[2]} ({found[1]})" if found else message


def _check_content_type(value: str) -> None:
    media_type, _, parameters = value.partition(";")
    charset = re.search(r'charset\s*=\s*"?([^\s;"]+)', parameters, re.IGNORECASE)
    if media_type.strip().lower() != "application/json":
        raise Refused(
            "unsupported_media_type",
            f"the content type is {value!r}, not application/json",
            hint="job documents can also be sent as application/yaml",
        )
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise Refused("unsupported_media_type", f"the charset is {charset[1]!r}, not UTF-8")


async def _read(request: Request, limit_bytes: int) -> bytes:
    """Return the body. Raises Refused as soon as the header or the received bytes show that the
    body is too large."""
    too_large = Refused("body_too_large", f"the body is larger than {limit_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    if (begin := getattr(request.state, "begin_body", None)) is not None:
        begin()
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Refuses repeated keys, and strings that can't be stored.

    NaN and Infinity are not JSON, but are read as numbers, so that the error names the field that
    contains them.
    """
    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=_each_key_once)
    except RecursionError:
        raise Refused("malformed_request", TOO_DEEP) from None
    except UnicodeDecodeError:
        raise Refused("malformed_request", "the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refused("malformed_request", f"the body is not JSON: {error.msg} ({where})") from None
    except ValueError:  # int() refuses very long numbers, which no document needs
        detail = "a number in the body has more than 4,300 digits"
        raise Refused("malformed_request", detail) from None
    if not isinstance(document, dict):
        raise Refused("malformed_request", "the body is JSON, but not an object")
    try:
        validation.check_values(document)
    except Fault as fault:
        raise _refused(fault) from None
    return document


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Refused("malformed_request", f"the key {key[:100]!r} appears twice")
        found[key] = value
    return found


def check(document: Mapping[str, Any]) -> JobSpec:
    """Return the document as a JobSpec. Raises Refused with the first invalid field and the
    reason."""
    return _checked(lambda: validation.check(document))


def check_as(kind: type[D], document: Mapping[str, Any]) -> D:
    """Return the document as an instance of `kind`. Raises Refused like `check`."""
    return _checked(lambda: validation.check_as(kind, document))


def _checked(check: Callable[[], D]) -> D:
    try:
        return check()
    except Fault as fault:
        raise _refused(fault) from None


def _refused(fault: Fault) -> Refused:
    return Refused(fault.code, fault.detail, fault.pointer, fault.hint)


def fingerprint(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the document in canonical form, for an idempotency key."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
