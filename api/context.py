"""The dependencies of routes: the running service and the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from api.http.concurrency import ConcurrencyLimiter, ConcurrencyLimits
from api.observability.prometheus import Telemetry
from api.problems import Refused
from api.security.auth import Authority
from api.security.sign_in import SignIn
from service.domain import callers
from service.jobs.faults import FaultService
from service.jobs.queries import Queries
from service.jobs.service import Jobs
from service.runtime import Runtime


@dataclass
class Context:
    """State of one application, in `app.state.context` while the application runs."""

    runtime: Runtime
    authority: Authority
    sign_in: SignIn
    telemetry: Telemetry
    limiter: ConcurrencyLimiter
    bulk: ConcurrencyLimiter
    """Concurrency limiter for changes of many jobs, which can take minutes. Other limited requests
    don't wait for them."""
    uploads: ConcurrencyLimiter
    """Concurrency limiter for updates from clients of federated jobs. The parts of an update are
    held in memory."""
    files: ConcurrencyLimiter = field(
        default_factory=lambda: ConcurrencyLimiter(ConcurrencyLimits(at_once=2, of_caller=1))
    )
    """Concurrency limiter for uploads of files, which are held in memory."""
    tables: ConcurrencyLimiter = field(
        default_factory=lambda: ConcurrencyLimiter(ConcurrencyLimits(at_once=2, of_caller=1))
    )
    """Concurrency limiter for lists of jobs as files, whose values are held in memory."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is asked to stop, so that long polls answer immediately."""


# The dependencies are coroutines even though they await nothing, because FastAPI would run a plain
# function in a thread, and the thread would cost more than the function itself.


async def context(request: Request) -> Context:
    return context_of(request)


def context_of(request: Request) -> Context:
    found: Context = request.app.state.context
    return found


async def caller(request: Request) -> str:
    """Return the name of the caller."""
    return await caller_of(request)


async def caller_of(request: Request) -> str:
    known: str | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    if "\0" in request.url.path or "%00" in str(request.url.query):
        raise Refused("malformed_request", "the URL contains a NUL character")
    name = await context_of(request).sign_in.caller(request)
    request.state.caller = name
    return name


async def actor(request: Request) -> str:
    """Return the name of the caller for records, such as an event's `actor`."""
    return context_of(request).authority.actor(await caller_of(request))


def refuse_unless_admin(context: Context, caller: str, may: str) -> None:
    """Raise Refused unless the caller is an admin. `may` names the action in the message."""
    if not context.authority.is_admin(caller):
        hint = "ask the operator to add :admin to the end of your line in DRAY_TOKENS_FILE"
        raise Refused("forbidden", f"only an admin may {may}", None, hint)


async def admin(request: Request) -> str:
    """Return the caller's name, for use in records. Raises Refused if the caller is not allowed to
    change queues."""
    name, context = await caller_of(request), context_of(request)
    refuse_unless_admin(context, name, "change queues")
    return context.authority.actor(name)


async def whole_caller(request: Request) -> callers.Caller:
    """Return the caller, and whether the caller is an admin."""
    name = await caller_of(request)
    return callers.Caller(name, context_of(request).authority.is_admin(name))


async def whose(request: Request) -> str | None:
    """Return the user whose objects the caller can see, or None if the caller is an admin, who can
    see the objects of all users."""
    caller = await caller_of(request)
    return None if context_of(request).authority.is_admin(caller) else caller


async def no_parameters(request: Request) -> None:
    """Refuse all query parameters, because silently ignoring one would mislead the caller."""
    for name in request.query_params:
        raise Refused("invalid_parameter", f"there is no parameter {name!r}")


def use_cases(of: Callable[[Runtime], Any]) -> Any:
    """Return a FastAPI dependency that provides a route's use cases. `of` gets the use cases from
    the running service, or creates them if they keep no state between requests."""

    async def found(request: Request) -> Any:
        return of(context_of(request).runtime)

    return Depends(found)


TheContext = Annotated[Context, Depends(context)]
TheJobs = Annotated[Jobs, use_cases(lambda runtime: runtime.jobs)]
TheQueries = Annotated[Queries, use_cases(lambda runtime: runtime.queries)]
TheFaults = Annotated[FaultService, use_cases(lambda runtime: runtime.faults)]
Caller = Annotated[str, Depends(caller)]
TheCaller = Annotated[callers.Caller, Depends(whole_caller)]
Actor = Annotated[str, Depends(actor)]
Whose = Annotated[str | None, Depends(whose)]
Admin = Annotated[str, Depends(admin)]
NoParameters = Depends(no_parameters)


class Query(BaseModel):
    """Base class of a route's query parameters. Unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PageQuery(Query):
    """Query parameters that select a page of a list."""

    limit: Annotated[int, Field(ge=1, le=500)] = 100
    cursor: str | None = None
    """`next_cursor` of the previous page."""
