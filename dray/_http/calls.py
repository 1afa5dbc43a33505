"""One request and its answer as flows, of which all methods of the clients consist."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

import httpx
from pydantic import BaseModel

from dray import errors
from dray._http.transport import Call, Connection, Flow, Retry, Sleep, exchange

LONG_POLL_S = 30.0
RECONNECT_PATIENCE_S = 60.0
"""Seconds for which waits, streams and downloads retry while the server is away or restarts."""

V = TypeVar("V", bound=BaseModel)


@dataclass(frozen=True)
class Calls:
    """Calls to one server."""

    connection: Connection

    @property
    def patient(self) -> Retry:
        """The retry rule for calls that should survive a restart of the server."""
        retry = self.connection.retry
        return replace(retry, patience_s=max(retry.patience_s, RECONNECT_PATIENCE_S))

    def send(self, call: Call, *, patient: bool = False) -> Flow[httpx.Response]:
        retry = self.patient if patient else self.connection.retry
        return (yield from exchange(call, retry, base_url=self.connection.url))

    def read(self, view: type[V], call: Call, *, patient: bool = False) -> Flow[V]:
        response = yield from self.send(call, patient=patient)
        return self.parse(view, response.content, call)

    def parse(self, view: type[V], content: bytes | str, call: Call) -> V:
        """`content` as `view`; raises TransportError if the content does not fit."""
        try:
            return view.model_validate_json(content)
        except ValueError:
            raise errors.TransportError(
                f"{self.connection.url} answered {call.path} with something that is no "
                f"{view.__name__}: is it a dray server, and no newer than this client?"
            ) from None

    def pause_if_hurried(self, asked: float, wait_s: float, *, changed: bool) -> Flow[None]:
        """Pause after an early answer: a server that is stopping answers long polls at once."""
        took_s = self.connection.retry.clock() - asked
        pause_s = min(0.5, wait_s - took_s)
        if not changed and pause_s > 0:
            yield Sleep(pause_s)


def params(**given: str | float | None) -> tuple[tuple[str, str], ...]:
    """Query parameters, without those that are None."""
    return tuple((name, f"{value}") for name, value in given.items() if value is not None)


def moment(time: datetime | None) -> str | None:
    """A time as a query parameter; ValueError without a time zone."""
    if time is not None and time.tzinfo is None:
        raise ValueError(f"{time} has no time zone: use, for instance, datetime.now(UTC)")
    return time.isoformat() if time is not None else None
