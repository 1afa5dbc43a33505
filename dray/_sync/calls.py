# Written by `make blocking` from dray/_async/calls.py: change that file instead.
"""Sending requests and parsing responses. All methods of the client are built on this module."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Protocol, TypeVar, cast

import httpx
from pydantic import BaseModel

from dray import errors
from dray._http.transport import (
    Call,
    Connection,
    Parameters,
    failure_of,
    may_repeat,
    never_arrived,
    no_answer,
    params,
)

T = TypeVar("T")
V = TypeVar("V", bound=BaseModel)


class ItemList(Protocol[T]):
    """A response that contains a list of items."""

    items: list[T]


class Page(ItemList[T], Protocol[T]):
    """A response that contains one page of a paginated list."""

    next_cursor: str | None


class Calls:
    """Base class of the client's methods: calls to one server."""

    def __init__(self, connection: Connection, http: httpx.Client) -> None:
        self._connection = connection
        self._clock = connection.retry.clock
        self._http = http

    def _send(self, call: Call, *, patient: bool = False) -> httpx.Response:
        """Send a call, and retry until the call succeeds or fails permanently, or the retry time
        has elapsed.

        Every call of this API is safe to retry: GET, DELETE and cancel can be repeated, and a
        submission has an idempotency key. Other POST requests without a key are sent again only if
        they certainly did not arrive, or were rejected with 429. Raises the exceptions of
        `dray.errors`. The caller must close the response of a streamed call.
        """
        retry = self._connection.patient if patient else self._connection.retry
        began = retry.clock()
        tries = 0
        while True:
            tries += 1
            failure: errors.DrayError
            retry_after_s = None
            try:
                response = self._send_once(call)
            except httpx.RequestError as error:
                failure = no_answer(error, self._connection.url)
                if not (call.is_safe or never_arrived(error)):
                    raise failure from None
            else:
                refused = failure_of(call, response, tries)
                if refused is None:
                    return response
                if not may_repeat(call, refused):
                    raise refused
                failure, retry_after_s = refused, refused.retry_after_s
            delay_s = retry.delay_s(tries, retry_after_s)
            if retry.clock() - began + delay_s > retry.patience_s:
                raise failure
            time.sleep(delay_s)

    def _send_once(self, call: Call) -> httpx.Response:
        request = self._http.build_request(**self._connection.arguments(call))
        response = self._http.send(request, stream=call.streamed)
        if call.streamed and not response.is_success:
            with closing(response):
                response.read()
        return response

    def _read(self, view: type[V], call: Call, *, patient: bool = False) -> V:
        response = self._send(call, patient=patient)
        return self._connection.parse(view, response.content, call)

    def _list(self, view: type[ItemList[T]], path: str, query: Parameters = ()) -> list[T]:
        """Return all items of a list that is not paginated."""
        found: ItemList[T] = self._read(cast("Any", view), Call("GET", path, query))
        return found.items

    def _items(
        self, view: type[Page[T]], path: str, query: Parameters = (), *, page_size: int
    ) -> Generator[T, None, None]:
        """Yield the items of a paginated list. Each page is fetched when it is needed."""
        cursor: str | None = None
        while True:
            call = Call("GET", path, (*query, *params(limit=page_size, cursor=cursor)))
            page: Page[T] = self._read(cast("Any", view), call)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def _pause_if_hurried(self, asked: float, wait_s: float, *, changed: bool) -> None:
        """Pause after an early response, because a server that is shutting down answers long polls
        immediately."""
        took_s = self._clock() - asked
        pause_s = min(0.5, wait_s - took_s)
        if not changed and pause_s > 0:
            time.sleep(pause_s)
