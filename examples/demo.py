"""`make demo`: runs one job from start to finish on this machine and leaves nothing behind.

Starts the service with an embedded Ray in a temporary folder, submits examples/digits.yaml with the
SDK, follows the job, downloads its result and shuts everything down.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dray import Client
from dray.cli.display.watch import watch
from dray.views import JobState

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


def main() -> int:
    home = Path(os.environ.get("DRAY_HOME") or tempfile.mkdtemp(prefix="dray-demo-"))
    url = f"http://127.0.0.1:{free_port()}"
    log_path = home / "service.log"
    home.mkdir(parents=True, exist_ok=True)
    print(f"Starting the service and its embedded Ray (state in {home}) ...")
    service = start_service(home, url, log_path)
    try:
        with Client(url) as client:
            wait_until_ready(client, service, log_path)
            print(f"  API            {url}/openapi.json")
            print(f"  Ray dashboard  {client.cluster().ray_dashboard}")
            return train(client, home / "model")
    finally:
        stop_service(service)


def train(client: Client, destination: Path) -> int:
    job = client.submit(ROOT / "examples" / "digits.yaml")
    print(f"Submitted {job.id}: {job.spec['recipe']}, {job.world_size} ranks")
    job = watch(client, job.id)
    if job.state is not JobState.SUCCEEDED:
        print(f"The job ended {job.state}: {job.reason.message}")
        return 1
    files = client.download(job.id, destination)
    accuracy = job.summary.get("val/accuracy")
    print(f"Accuracy on held-out images: {float(accuracy or 0.0):.1%}")
    print(f"The model: {next(path for path in files if path.name == 'model.safetensors')}")
    return 0


def start_service(home: Path, url: str, log_path: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "DRAY_HOME": str(home),
        "DRAY_PORT": url.rsplit(":", 1)[1],
        "DRAY_LOCAL_SLOTS": os.environ.get("DRAY_LOCAL_SLOTS", "2"),
    }
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "api"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def wait_until_ready(client: Client, service: subprocess.Popen[bytes], log_path: Path) -> None:
    """Wait until a node accepts jobs. Raises SystemExit with the service's log if none ever
    does."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and service.poll() is None:
        try:
            if any(node.accepted for node in client.cluster().nodes):
                return
        except Exception:  # not listening yet
            if service.poll() is not None:
                break
        time.sleep(0.2)
    raise SystemExit(f"The service did not start:\n{log_path.read_text()[-4000:]}")


def stop_service(service: subprocess.Popen[bytes]) -> None:
    print("Stopping the service and its Ray ...")
    service.send_signal(signal.SIGTERM)
    try:
        service.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
        raise SystemExit("The service did not stop in time and was killed.") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
