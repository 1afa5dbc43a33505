"""The application: routes, the table of problems, and the running service behind them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

import dray
from api import openapi, problems, routes
from api.context import Context
from api.http.concurrency import ConcurrencyLimiter, ConcurrencyLimits
from api.http.limits import Admission, Limits
from api.mlflow import routes as mlflow
from api.observability.middleware import Observed
from api.observability.prometheus import Telemetry
from api.openai import routes as openai_routes
from api.routes import bulk, federation, jobs, status
from api.security.auth import Authority
from api.security.gate import Gate, cors
from api.security.sign_in import SignIn
from service.config.settings import Settings
from service.runtime import Runtime
from service.tracking.browser_sessions import BrowserSessions

FIRST = (status.router, jobs.router)
"""Routers that are included first: paths are matched in the order of the routers, and these routers
serve most requests."""


def _routers() -> list[APIRouter]:
    """Return the routers of all modules in `api/routes`, of `api.mlflow`, and of `api.openai`."""
    modules = pkgutil.walk_packages(routes.__path__, f"{routes.__name__}.")
    found = [importlib.import_module(each.name).router for each in modules if not each.ispkg]
    others = (router for router in found if router not in FIRST)
    return [*FIRST, *others, mlflow.router, openai_routes.router]


ROUTERS = _routers()


def create_app(
    settings: Settings, runtime: Runtime | None = None, *, loops: bool = True
) -> FastAPI:
    """Create the application. Raises BadTokensFile.

    When it starts, the application opens a runtime, with the service's loops unless `loops` is
    False. When the application ends, it closes this runtime. A runtime that is passed as an
    argument is neither opened nor closed.
    """
    telemetry = Telemetry()
    authority = Authority.of(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = runtime or await Runtime.open(settings, loops=loops)
        context = Context(
            *(running, authority, SignIn(authority, BrowserSessions(running.database)), telemetry),
            *(ConcurrencyLimiter(ConcurrencyLimits()), ConcurrencyLimiter(bulk.LIMITS)),
            ConcurrencyLimiter(federation.UPLOADS),
        )
        app.state.context = context
        try:
            yield
        finally:
            context.stopping.set()
            if runtime is None:
                await running.stop()

    app = FastAPI(
        title="dray",
        version=dray.__version__,
        description="Submit training jobs, and read back their metrics, logs and models.",
        lifespan=lifespan,
        openapi_url=None,  # `api.routes.server.reference` serves the description and the page
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in ROUTERS:
        app.include_router(router)
    gate = Gate(
        has_tokens=settings.tokens_file is not None,
        hosts=settings.allowed_hosts,
        origins=settings.allowed_origins,
    )
    if gate.origins:
        app.add_middleware(CORSMiddleware, **cors(gate.origins))
    admission = Admission(Limits.of(settings))
    app.add_middleware(Observed, telemetry=telemetry, gate=gate, admission=admission)
    problems.install(app, [route for router in ROUTERS for route in router.routes])
    openapi.install(app)
    return app


def description() -> dict[str, Any]:
    """Return the OpenAPI description of the API."""
    return create_app(Settings()).openapi()


def main() -> None:
    """Print the description of the API, for `make openapi`."""
    json.dump(description(), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
