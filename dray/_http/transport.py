"""The layer below both clients: building requests, deciding on retries, and parsing responses.

This module does no I/O. `dray._async.calls` sends the requests.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel

import dray
from dray import errors
from dray._http.home_sign_in import HomeSignIn
from dray._http.problems import from_response
from dray.home_token import is_loopback
from dray.input.invisible import invisible_character

DEFAULT_URL = "http://127.0.0.1:8420"
DEFAULT_TIMEOUT_S = 30.0
LONG_POLL_S = 30.0
RECONNECT_PATIENCE_S = 60.0
"""Number of seconds for which `wait`, streams and downloads keep retrying while the server is
unreachable."""

Parameters = tuple[tuple[str, str], ...]
V = TypeVar("V", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """A request. The request is sent again until it succeeds or `Retry` gives up."""

    method: str
    path: str
    params: Parameters = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    wait_s: float = 0.0
    """Seconds for which the server may delay the response. This time is added to the read
    timeout."""
    streamed: bool = False
    """Whether the body of a successful response is read piece by piece."""

    @classmethod
    def with_json(
        cls,
        method: str,
        path: str,
        document: Any,
        params: Parameters = (),
        headers: Mapping[str, str] | None = None,
    ) -> Call:
        """Return a call with a document as its body. Datetimes are written in ISO 8601. Raises
        SpecError if the document can't be encoded as JSON."""
        try:
            content = json.dumps(
                document, allow_nan=False, separators=(",", ":"), default=_as_json
            ).encode()
        except (TypeError, ValueError, RecursionError) as error:
            why = f"the request can't be written as JSON: {error}"
            raise errors.SpecError(why, pointer=_not_finite(document)) from None
        headers = {"Content-Type": "application/json", **(headers or {})}
        return cls(method, path, params, headers, content)

    @property
    def is_safe(self) -> bool:
        """Whether sending the call twice has the same effect as sending it once."""
        return (
            self.method != "POST"
            or "Idempotency-Key" in self.headers
            or self.path.endswith(("/cancel", "/preempt", "/code", "/code/parts", "/update"))
            or self.path == "/v1/models"
        )


def _as_json(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _not_finite(value: Any) -> str | None:
    """Return the JSON pointer of the first number that JSON can't represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        if (below := _not_finite(inner)) is not None:
            return f"/{str(key).replace('~', '~0').replace('/', '~1')}{below}"
    return None


@dataclass(frozen=True)
class Retry:
    """The retry policy for failed calls: exponential backoff with full jitter.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    patience_s: float = 3.0
    """No attempt begins later than this many seconds after the first attempt."""
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    jitter: Callable[[], float] = random.random
    """Returns a random number in [0, 1)."""
    clock: Callable[[], float] = time.monotonic

    def delay_s(self, tries: int, retry_after_s: float | None) -> float:
        """Return the number of seconds to wait after `tries` failed attempts."""
        ceiling = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(tries - 1, 30))
        # Add the jitter to Retry-After too. Otherwise, all clients that received the same value
        # would retry simultaneously.
        return (retry_after_s or 0.0) + ceiling * self.jitter()


FINAL_STATUSES = frozenset({501, 505, 507, 508, 511})
"""Statuses of server errors that a retry would not resolve, such as full storage."""


def is_passing(failure: errors.ApiError) -> bool:
    """Whether a retry of the call could succeed."""
    if isinstance(failure, errors.IdempotencyInFlight) or failure.status in (408, 429):
        return True
    return failure.status >= 500 and failure.status not in FINAL_STATUSES


def failure_of(call: Call, response: httpx.Response, tries: int) -> errors.ApiError | None:
    """Return the exception for a response, or None if the response is successful. The body must
    have been read."""
    if response.is_success:
        return None
    failure = from_response(response)
    is_gone = isinstance(
        failure, errors.JobNotFound | errors.QueueNotFound | errors.WebhookNotFound
    )
    if call.method == "DELETE" and tries > 1 and is_gone:
        return None  # an earlier attempt succeeded, and its response was lost
    return failure


def may_repeat(call: Call, failure: errors.ApiError) -> bool:
    """Whether the call can be sent again after this response. If the status is 429, the server has
    not processed the call."""
    return is_passing(failure) and (call.is_safe or failure.status == 429)


def never_arrived(error: httpx.RequestError) -> bool:
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def no_answer(error: httpx.RequestError, base_url: str) -> errors.TransportError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.ServerUnreachable(
            f"no dray server is reachable at {base_url} ({_cause(error)}). Start it with `make "
            "run`, or set DRAY_URL to the right address."
        )
    if isinstance(error, httpx.TimeoutException):
        return errors.RequestTimeout(f"{base_url} did not respond in time: try a longer timeout")
    return errors.TransportError(f"the connection to {base_url} was lost ({_cause(error)})")


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__


def params(**given: Any) -> Parameters:
    """Return query parameters. Each item of a list becomes a parameter; False and None are omitted.
    Raises ValueError for a time without a time zone."""
    found: list[tuple[str, str]] = []
    for name, value in given.items():
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        values = value if is_list else (value,)
        found += [(name, _text(each)) for each in values if each is not None and each is not False]
    return tuple(found)


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone: use a time such as datetime.now(UTC)")
        return value.isoformat()
    return "true" if value is True else f"{value}"


def present(**values: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def segment(name: str) -> str:
    """Return `name` quoted as one segment of a path."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} can't be part of a URL")
    return quote(name, safe="")


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query


@dataclass(frozen=True)
class Connection:
    """Address, credentials and retry policy, for both clients."""

    url: str
    headers: Mapping[str, str] = field(repr=False)  # includes the token
    timeout_s: float
    retry: Retry

    @classmethod
    def open(cls, url: str | None, token: str | None, timeout_s: float, retry: Retry) -> Connection:
        """Create a connection. `url` and `token` default to DRAY_URL and DRAY_TOKEN."""
        url = (url or os.environ.get("DRAY_URL") or DEFAULT_URL).rstrip("/")
        token = token or os.environ.get("DRAY_TOKEN")
        if not _is_address(url):
            raise errors.ServerUnreachable(f"{url!r} is not an http:// or https:// address")
        if token and not re.fullmatch(r"[\x21-\x7e]+", token):
            found = invisible_character(token) or "an invalid character"
            # The message must not contain the token.
            raise ValueError(f"the token contains {found}: copy it again, and check DRAY_TOKEN")
        headers = {"User-Agent": f"dray/{dray.__version__}", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return cls(url, headers, timeout_s, retry)

    @property
    def patient(self) -> Retry:
        """The retry policy for calls that should survive a restart of the server."""
        return replace(self.retry, patience_s=max(self.retry.patience_s, RECONNECT_PATIENCE_S))

    def client_options(self) -> dict[str, Any]:
        """Options of the httpx client."""
        address = urlsplit(self.url)
        is_local = is_loopback(address.hostname or "")
        signs_in = is_local and "Authorization" not in self.headers and not address.username
        return {
            "auth": HomeSignIn() if signs_in else None,
            # Proxy settings don't apply to a server on this machine.
            "trust_env": not is_local,
            # Without TLS there is nothing to verify, and loading the certificates takes 20 ms.
            "verify": address.scheme != "http",
        }

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return keyword arguments for the `request` methods of `httpx`."""
        read_s = self.timeout_s + call.wait_s
        return {
            "method": call.method,
            "url": self.url + call.path,
            "params": httpx.QueryParams(call.params),
            "headers": {**self.headers, **call.headers},
            "content": call.content,
            "timeout": httpx.Timeout(self.timeout_s, read=read_s),
        }

    def parse(self, view: type[V], content: bytes | str, call: Call) -> V:
        """Parse `content` as a `view`. Raises TransportError if the content is invalid."""
        try:
            return view.model_validate_json(content)
        except ValueError:
            raise errors.TransportError(
                f"the response of {self.url} to {call.path} is not a valid {view.__name__}: "
                f"check that {self.url} is a dray server, and that the server is not newer than "
                "this client"
            ) from None
