"""The peer for GET /v1/jobs/{id}: a typical route with FastAPI and SQLAlchemy.

Each request opens a session and runs three queries by primary or unique key. `response_model`
validates and serializes the response. The session is opened in the event loop, without a thread,
which results in the best throughput for such a route on SQLite. `python -m benchmarks.serving.plain
HOME PORT`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session, sessionmaker

from dray import views
from service.db.models import ClusterRow, JobLabelRow, JobRow


async def opened(request: Request) -> AsyncIterator[Session]:
    with request.app.state.sessions() as session:
        yield session


def create_app(database: Path) -> FastAPI:
    engine = create_engine(
        f"sqlite:///{database}", connect_args={"check_same_thread": False}, pool_size=8
    )
    app = FastAPI()
    app.state.sessions = sessionmaker(engine)

    @app.get("/v1/jobs/{job_id}", response_model=views.Job)
    async def get(job_id: str, session: Annotated[Session, Depends(opened)]) -> Any:
        row = session.scalar(select(JobRow).where(JobRow.id == job_id))
        if row is None:
            raise HTTPException(404)
        labels = session.scalars(select(JobLabelRow).where(JobLabelRow.job_id == job_id))
        cluster = session.get(ClusterRow, 1)
        return present(row, {label.key: label.value for label in labels}, cluster)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


def present(row: JobRow, labels: dict[str, str], cluster: ClusterRow | None) -> dict[str, Any]:
    """Convert the row for the response model."""
    base = f"/v1/jobs/{row.id}"
    names = ("metrics", "logs", "events", "artifacts")
    return {
        **{name: getattr(row, name) for name in COLUMNS},
        "labels": labels,
        "reason": {"code": row.reason_code, "message": row.reason_message},
        "warnings": row.warnings or [],
        "links": {
            "self": base,
            **{name: f"{base}/{name}" for name in names},
            "ray_dashboard": cluster.ray_dashboard if cluster else None,
        },
    }


COLUMNS = [name for name in views.Job.model_fields if name in JobRow.__table__.columns]


async def serve(home: Path, port: int) -> None:
    """Serve with the same server settings as dray."""
    config = uvicorn.Config(
        create_app(home / "dray.db"),
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
