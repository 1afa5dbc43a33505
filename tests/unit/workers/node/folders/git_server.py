"""A web server with git repositories and files, on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


def git(folder: Path, *words: str, given: bytes = b"") -> str:
    """Run git in a folder, without a user's configuration, and return its output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_CONFIG_NOSYSTEM": "1",
        **{
            f"GIT_{who}_{what}": "a@b"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    done = subprocess.run(
        ["git", *words], cwd=folder, input=given, env=environment, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def repository(folder: Path, files: dict[str, str]) -> str:
    """Make a repository of files, and links (`-> goal`); returns the hash of its commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--template=")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=x")
    return git(folder, "rev-parse", "HEAD")


@dataclass
class GitServer:
    """Serves `/NAME`, a repository of its folder, by git's own program, and `/files/NAME`."""

    folder: Path
    url: str = ""
    redirect_to: str | None = None
    status: int | None = None
    """If set, the answer to every request."""
    token: str | None = None
    """Required content of the header `Authorization`."""
    is_stopped: bool = False
    """Whether it accepts requests and answers none."""
    seen: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(folder: Path) -> Iterator[GitServer]:
    shared = GitServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self._body())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers["Content-Length"]))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            return found

        def _answer(self, body: bytes) -> None:
            shared.seen.append(self.path)
            if shared.is_stopped:
                shared.released.wait(60)
                return
            if shared.redirect_to is not None:
                self.send_response(302)
                self.send_header("Location", shared.redirect_to + self.path)
                self.end_headers()
            elif shared.status is not None:
                self.send_error(shared.status)
            elif shared.token is not None and self.headers.get("Authorization") != shared.token:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic realm=x")
                self.end_headers()
            elif self.path.startswith("/files/"):
                self._send_file(shared.folder / self.path.lstrip("/"))
            else:
                self._send_git(body)

        def _send_file(self, path: Path) -> None:
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _send_git(self, body: bytes) -> None:
            url = urlsplit(self.path)
            environment = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(shared.folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "PATH_INFO": url.path,
                "QUERY_STRING": url.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
            }
            program = [shutil.which("git") or "git", "http-backend"]
            out = subprocess.run(program, input=body, env=environment, capture_output=True).stdout
            head, _, content = out.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    shared.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield shared
    finally:
        shared.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
