"""The layer under both clients: requests are data, and their handling is in generators.

A *flow* is a generator that yields effects (`Send`, `Read`, `Sleep`, ...) and is sent their
results; its return value is the method's. A flow that also yields `Item`s is an iterator's body.
All logic (retries, paging, waiting, downloading) lives in flows and does no I/O; the drivers in
`dray._http.drivers` perform effects, one blocking, one awaiting, so that nothing is written twice.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

import dray
from dray import errors
from dray._http.problems import from_response

DEFAULT_URL = "http://127.0.0.1:8420"
DEFAULT_TIMEOUT_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One request, to be sent as often as `Retry` allows."""

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    wait_s: float = 0.0
    """Seconds for which the server may delay the answer; added to the read timeout."""
    streamed: bool = False
    """Whether the body of a success is `Read` piece by piece."""

    @property
    def is_safe(self) -> bool:
        """Whether sending the call twice has no more effect than sending it once."""
        return (
            self.method != "POST"
            or "Idempotency-Key" in self.headers
            or self.path.endswith(("/cancel", "/preempt", "/code", "/code/parts", "/update"))
        )


@dataclass(frozen=True)
class Send:
    """Effect: send the call; the result is the `httpx.Response`."""

    call: Call


@dataclass(frozen=True)
class Read:
    """Effect: wait for the next piece of a streamed body; the result is b"" at its end."""

    response: httpx.Response


@dataclass(frozen=True)
class Close:
    """Effect: close a streamed response. A response left open is closed with its flow."""

    response: httpx.Response


@dataclass(frozen=True)
class Sleep:
    """Effect: let `seconds` pass."""

    seconds: float


@dataclass(frozen=True)
class Run:
    """Effect: do blocking work on this machine (files); the result is its return value."""

    work: Callable[[], Any]


@dataclass(frozen=True)
class Item(Generic[T]):
    """Not an effect: one value for the iterator's consumer."""

    value: T


Effect = Send | Read | Close | Sleep | Run
Flow = Generator[Effect, Any, T]
Stream = Generator[Effect | Item[T], Any, None]


@dataclass(frozen=True)
class Retry:
    """The rule for repeating failed calls: exponential backoff with full jitter.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    patience_s: float = 3.0
    """Seconds after the first try beyond which no other try begins."""
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    jitter: Callable[[], float] = random.random
    """Draws from [0, 1)."""
    clock: Callable[[], float] = time.monotonic

    def delay_s(self, tries: int, retry_after_s: float | None) -> float:
        """Seconds before the next try, `tries` having failed."""
        ceiling = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(tries - 1, 30))
        # On top of Retry-After, or all clients that got the same answer would return at once.
        return (retry_after_s or 0.0) + ceiling * self.jitter()


FINAL_STATUSES = frozenset({501, 505, 507, 508, 511})
"""Server errors that a pause does not resolve, such as a full storage."""


def is_passing(failure: errors.ApiError) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(failure, errors.IdempotencyInFlight) or failure.status in (408, 429):
        return True
    return failure.status >= 500 and failure.status not in FINAL_STATUSES


def exchange(call: Call, retry: Retry, *, base_url: str) -> Flow[httpx.Response]:
    """Send the call until it succeeds, fails for good, or the patience ends.

    This is safe for every call of this API: GET, DELETE and cancel may be repeated, and a submit
    carries an idempotency key. A POST without a key that is no cancel is sent once, unless it is
    known not to have arrived, or was refused by a 429. Raises the classes of `dray.errors`.
    """
    began = retry.clock()
    tries = 0
    while True:
        tries += 1
        retry_after_s = None
        failure: errors.DrayError
        try:
            response: httpx.Response = yield Send(call)
        except httpx.RequestError as error:
            failure = no_answer(error, base_url)
            if not (call.is_safe or _never_arrived(error)):
                raise failure from None
        else:
            if response.is_success:
                return response
            failure = from_response(response)
            is_gone = isinstance(
                failure, errors.JobNotFound | errors.QueueNotFound | errors.WebhookNotFound
            )
            if call.method == "DELETE" and tries > 1 and is_gone:
                return response  # an earlier try succeeded and its answer was lost
            # An answer of 429 says that nothing was done.
            if not (is_passing(failure) and (call.is_safe or failure.status == 429)):
                raise failure
            retry_after_s = failure.retry_after_s
        delay_s = retry.delay_s(tries, retry_after_s)
        if retry.clock() - began + delay_s > retry.patience_s:
            raise failure
        yield Sleep(delay_s)


def _never_arrived(error: httpx.RequestError) -> bool:
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def no_answer(error: httpx.RequestError, base_url: str) -> errors.TransportError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.ServerUnreachable(
            f"no dray server answers at {base_url} ({_cause(error)}): is it running? "
            "Start it with `make run`, or point DRAY_URL at the right address."
        )
    if isinstance(error, httpx.TimeoutException):
        return errors.RequestTimeout(f"{base_url} did not answer in time; try a larger timeout")
    return errors.TransportError(f"the connection to {base_url} broke ({_cause(error)})")


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__


def segment(name: str) -> str:
    """`name` as one segment of a path."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no id")
    return quote(name, safe="")


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not parsed.query


@dataclass(frozen=True)
class Connection:
    """Address, credentials and retry rule; the same for both clients."""

    url: str
    headers: Mapping[str, str] = field(repr=False)  # the token is among them
    timeout_s: float
    retry: Retry

    @classmethod
    def open(cls, url: str | None, token: str | None, timeout_s: float, retry: Retry) -> Connection:
        """Open a connection; `url` and `token` default to DRAY_URL and DRAY_TOKEN."""
        url = (url or os.environ.get("DRAY_URL") or DEFAULT_URL).rstrip("/")
        token = token or os.environ.get("DRAY_TOKEN")
        if not _is_address(url):
            raise errors.ServerUnreachable(f"{url!r} is not an http:// or https:// address")
        if token and not re.fullmatch(
            r"[\x21-\x7e]+", token
        ):  # the message must not contain the token
            raise ValueError("the token holds a character that no token has; look at DRAY_TOKEN")
        headers = {"User-Agent": f"dray/{dray.__version__}", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return cls(url, headers, timeout_s, retry)

    @property
    def has_token(self) -> bool:
        return "Authorization" in self.headers

    def arguments(self, call: Call) -> dict[str, Any]:
        """Keyword arguments for the `request` methods of `httpx`."""
        read_s = self.timeout_s + call.wait_s
        return {
            "method": call.method,
            "url": self.url + call.path,
            "params": httpx.QueryParams(call.params),
            "headers": {**self.headers, **call.headers},
            "content": call.content,
            "timeout": httpx.Timeout(self.timeout_s, read=read_s),
        }
