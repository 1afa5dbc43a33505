"""A real S3 server for tests: moto, in a separate process.

Run as a program, it prints its port and exits when its standard input is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.harness import ROOT


@dataclass(frozen=True)
class ObjectStore:
    """The server's address, and a client to fill it."""

    endpoint_url: str
    files: Any
    """An s3fs file system with the owner's credentials."""
    key: str = "AKIATESTKEY"
    secret: str = "not-a-secret-of-anyone"

    def put(self, path: str, content: bytes) -> str:
        """Return the URL of an object in the only bucket."""
        self.files.pipe_file(f"bucket/{path}", content)
        return f"s3://bucket/{path}"

    def trust(self, num_calls: int) -> None:
        """From now on, accept this many calls without checking their signatures."""
        self._order("reset-auth", str(num_calls))

    def empty(self) -> None:
        """Reset the store to a single empty bucket."""
        self.trust(10**9)
        self._order("reset")
        self.files.call_s3("create_bucket", Bucket="bucket")

    def _order(self, what: str, body: str = "") -> None:
        url = f"{self.endpoint_url}/moto-api/{what}"
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, body.encode(), kind, method="POST")
        urllib.request.urlopen(request, timeout=60).close()


@contextmanager
def serving_s3(folder: Path) -> Iterator[ObjectStore]:
    """Start the store, which logs to `folder`."""
    import s3fs

    with (
        (folder / "s3.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.object_store"],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
            files = s3fs.S3FileSystem(
                key=ObjectStore.key,
                secret=ObjectStore.secret,
                endpoint_url=endpoint,
                use_listings_cache=False,
            )
            yield ObjectStore(endpoint, files)
        finally:
            # The pipe stays open as long as a process forked in the meantime holds it.
            server.terminate()


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    print(port, flush=True)
    sys.stdin.read()  # exits even if the test process is killed
    server.stop()


if __name__ == "__main__":
    main()
