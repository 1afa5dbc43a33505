"""If Ray does not start, the reason is Ray's own error message."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cluster.ray import start_failure

NO_GCS = (
    "INFO scripts.py:1043 -- Local node IP: 192.0.2.2\n"
    "[2026-11-24 06:58:44,181 E 32217 32327] rpc_client.h:204: Failed to connect to GCS.\n"
)
NO_AGENT = (
    "[2026-11-24 07:16:40,551 E 1330 1353] (gcs_server) exporter.cc:87: Failed to establish "
    "connection to the event+metrics exporter agent.\n"
)
FAILED_CHECK = "Check failed: server_ Failed to start the grpc server. The specified port is 45027."
PORT_TAKEN = (
    "[2026-11-24 06:58:29,248 C 32326 32326] (gcs_server) grpc_server.cc:134:  An unexpected "
    "system state has occurred. You have likely discovered a bug in Ray. Please report this issue "
    "at https://github.com/ray-project/ray/issues and we'll work with you to fix it. Check failed: "
    "server_ Failed to start the grpc server. The specified port is 45027.\n"
    "*** StackTrace Information ***\n/ray/gcs_server(+0x23ccf4) [0x55d578129cf4] main\n"
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "node.py", line 1271, in _prepare_socket_file\n'
    "    raise OSError(\n"
    "OSError: [Errno 28] No space left on device: '/tmp/x'\n"
)
AGENT_FAILED = (
    "[2026-11-24 06:59:08,551 E 1330 1353] (raylet) agent_manager.cc:87: The raylet exited "
    "immediately because one Ray agent failed, agent_name = dashboard_agent.\n"
)
NO_ROOM = "OSError: [Errno 28] No space left on device: '/tmp/x'"
NO_PORT = "OSError: [Errno 98] Address already in use\n"


@pytest.mark.parametrize(
    ("daemon", "logs", "reason"),
    [
        (TRACEBACK, {}, "ray start: OSError: [Errno 28] No space left on device: '/tmp/x'"),
        (
            NO_GCS,
            {"gcs_server.err": PORT_TAKEN, "monitor.log": NO_PORT},
            f"gcs_server: {FAILED_CHECK}",
        ),
        (
            "INFO scripts.py:1043 -- Local node IP: 192.0.2.2\n",
            {"raylet.err": AGENT_FAILED, "dashboard_agent.log": NO_PORT, "dashboard.log": NO_PORT},
            "dashboard_agent: OSError: [Errno 98] Address already in use",
        ),
        (
            "",
            {"dashboard_MetricsHead.log": TRACEBACK, "gcs_server.err": ""},
            "dashboard_MetricsHead: OSError: [Errno 28] No space left on device: '/tmp/x'",
        ),
        ("", {"dashboard.err": TRACEBACK, "dashboard.log": NO_PORT}, f"dashboard: {NO_ROOM}"),
        (NO_GCS, {}, "ray start: Failed to connect to GCS."),
        ("", {"gcs_server.err": NO_AGENT, "raylet.err": PORT_TAKEN}, f"raylet: {FAILED_CHECK}"),
        ("", {"raylet.err": ""}, None),
    ],
)
def test_the_program_and_its_last_error_are_named(
    tmp_path: Path, daemon: str, logs: dict[str, str], reason: str | None
) -> None:
    (tmp_path / "daemon.log").write_text(daemon)
    folder = tmp_path / "ray-x" / "session_2026-11-24_06-36-55_233754_17457" / "logs"
    folder.mkdir(parents=True)
    for name, text in logs.items():
        (folder / name).write_text(text)
    assert start_failure.reason(tmp_path / "daemon.log", tmp_path / "ray-x") == reason


def test_without_logs_there_is_no_reason(tmp_path: Path) -> None:
    assert start_failure.reason(tmp_path / "daemon.log", tmp_path / "ray-x") is None
