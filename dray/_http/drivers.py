"""The drivers that perform the effects of flows: one blocking, one asynchronous."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from dray._http.transport import (
    Call,
    Close,
    Connection,
    Effect,
    Flow,
    Item,
    Read,
    Send,
    Sleep,
    Stream,
)

T = TypeVar("T")


@dataclass(frozen=True)
class _Failed:
    """Result of an effect that failed."""

    error: Exception


def _resume(flow: Any, result: Any) -> Any:
    """Send the flow the result of its effect; returns its next step, or raises StopIteration."""
    return flow.throw(result.error) if isinstance(result, _Failed) else flow.send(result)


class SyncDriver:
    """Performs effects by blocking."""

    def __init__(self, connection: Connection, http: httpx.Client) -> None:
        self._connection = connection
        self._http = http

    def run(self, flow: Flow[T]) -> T:
        bodies: dict[httpx.Response, Iterator[bytes]] = {}
        try:
            effect = next(flow)
            while True:
                effect = _resume(flow, self._attempt(effect, bodies))
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            self._end(flow, bodies)

    def iterate(self, stream: Stream[T]) -> Generator[T, None, None]:
        bodies: dict[httpx.Response, Iterator[bytes]] = {}
        try:
            step = next(stream)
            while True:
                if isinstance(step, Item):
                    yield step.value
                    step = stream.send(None)
                else:
                    step = _resume(stream, self._attempt(step, bodies))
        except StopIteration:
            return
        finally:
            self._end(stream, bodies)

    def _attempt(self, effect: Effect, bodies: dict[httpx.Response, Iterator[bytes]]) -> Any:
        try:
            return self._perform(effect, bodies)
        except Exception as error:
            return _Failed(error)

    def _perform(self, effect: Effect, bodies: dict[httpx.Response, Iterator[bytes]]) -> Any:
        match effect:
            case Send(call):
                return self._send(call, bodies)
            case Read(response):
                return next(bodies[response], b"")
            case Close(response):
                bodies.pop(response, None)
                return response.close()
            case Sleep(seconds):
                return time.sleep(seconds)
        return effect.work()

    def _send(self, call: Call, bodies: dict[httpx.Response, Iterator[bytes]]) -> httpx.Response:
        request = self._http.build_request(**self._connection.arguments(call))
        response = self._http.send(request, stream=call.streamed)
        if call.streamed:
            bodies[response] = response.iter_bytes()
            if not response.is_success:
                response.read()
        return response

    @staticmethod
    def _end(flow: Any, bodies: dict[httpx.Response, Any]) -> None:
        flow.close()
        for response in bodies:
            response.close()


class AsyncDriver:
    """Performs effects by awaiting."""

    def __init__(self, connection: Connection, http: httpx.AsyncClient) -> None:
        self._connection = connection
        self._http = http

    async def run(self, flow: Flow[T]) -> T:
        bodies: dict[httpx.Response, AsyncIterator[bytes]] = {}
        try:
            effect = next(flow)
            while True:
                effect = _resume(flow, await self._attempt(effect, bodies))
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            await self._end(flow, bodies)

    async def iterate(self, stream: Stream[T]) -> AsyncGenerator[T, None]:
        bodies: dict[httpx.Response, AsyncIterator[bytes]] = {}
        try:
            step = next(stream)
            while True:
                if isinstance(step, Item):
                    yield step.value
                    step = stream.send(None)
                else:
                    step = _resume(stream, await self._attempt(step, bodies))
        except StopIteration:
            return
        finally:
            await self._end(stream, bodies)

    async def _attempt(
        self, effect: Effect, bodies: dict[httpx.Response, AsyncIterator[bytes]]
    ) -> Any:
        try:
            return await self._perform(effect, bodies)
        except Exception as error:
            return _Failed(error)

    async def _perform(
        self, effect: Effect, bodies: dict[httpx.Response, AsyncIterator[bytes]]
    ) -> Any:
        import asyncio  # slow to import, and the blocking client does not need it

        match effect:
            case Send(call):
                return await self._send(call, bodies)
            case Read(response):
                return await anext(bodies[response], b"")
            case Close(response):
                bodies.pop(response, None)
                return await response.aclose()
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
        return await asyncio.to_thread(effect.work)

    async def _send(
        self, call: Call, bodies: dict[httpx.Response, AsyncIterator[bytes]]
    ) -> httpx.Response:
        request = self._http.build_request(**self._connection.arguments(call))
        response = await self._http.send(request, stream=call.streamed)
        if call.streamed:
            bodies[response] = response.aiter_bytes()
            if not response.is_success:
                await response.aread()
        return response

    @staticmethod
    async def _end(flow: Any, bodies: dict[httpx.Response, Any]) -> None:
        flow.close()
        for response in bodies:
            await response.aclose()
