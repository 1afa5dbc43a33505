"""The application: routes, the table of problems, and the running service behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

import dray
from api import openapi, problems
from api.auth import Authority, load_tokens
from api.context import Context
from api.gate import Gate, cors
from api.observing import Observed
from api.routes import (
    artifacts,
    attempts,
    checkpoints,
    cluster,
    drills,
    events,
    hangs,
    health,
    jobs,
    logs,
    metrics,
    plan,
    status,
)
from api.telemetry import Telemetry
from service.runtime import Runtime
from service.settings import Settings

ROUTERS: tuple[APIRouter, ...] = (
    status.router,
    jobs.router,
    plan.router,
    metrics.router,
    logs.router,
    events.router,
    attempts.router,
    hangs.router,
    drills.router,
    checkpoints.router,
    artifacts.router,
    cluster.router,
    health.router,
)


def create_app(
    settings: Settings, runtime: Runtime | None = None, *, loops: bool = True
) -> FastAPI:
    """The application.

    It opens a runtime when it starts and stops it when it ends, with the service's loops unless
    `loops` is False; a runtime that is handed in stays its owner's. Raises BadTokensFile.
    """
    telemetry = Telemetry()
    authority = Authority(load_tokens(settings.tokens_file) if settings.tokens_file else None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = runtime or await Runtime.open(settings, loops=loops)
        context = Context(running, authority, telemetry)
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
        docs_url=None,  # its page would load scripts from elsewhere
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
    app.add_middleware(Observed, telemetry=telemetry, gate=gate)
    problems.install(app, [route for router in ROUTERS for route in router.routes])
    openapi.install(app)
    return app
