"""A real server that speaks S3, for tests: moto, in a process of its own.

As a program it prints its port and lives until its standard input is closed.
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
    """The server's address, and hands to fill it."""

    endpoint_url: str
    files: Any
    """s3fs, as the store's owner uses it."""
    key: str = "AKIATESTKEY"
    secret: str = "not-a-secret-of-anyone"

    def put(self, path: str, content: bytes) -> str:
        """Its URL, in the one bucket."""
        self.files.pipe_file(f"bucket/{path}", content)
        return f"s3://bucket/{path}"

    def trust(self, num_calls: int) -> None:
        """From now on, take so many calls without looking at who signed them."""
        self._order("reset-auth", str(num_calls))

    def empty(self) -> None:
        """One bucket, and nothing in it."""
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
    """The store, which logs into `folder`."""
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
            # The pipe does not end where a process that was forked meanwhile has it, too.
            server.terminate()


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    print(port, flush=True)
    sys.stdin.read()  # ends with a test process that is killed
    server.stop()


if __name__ == "__main__":
    main()
