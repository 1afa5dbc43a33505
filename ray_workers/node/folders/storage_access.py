"""Gives a script access, through its rank actor, to storage that requires the node's credentials.

The training process sends requests over a socket to copy files to and from its job's own URLs
(`dray.train.files`). The rank actor, whose process doesn't run user code, copies the files. Files
in a storage folder don't have to be copied in this way."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dray.train import files
from ray_workers.shared.contracts import RankTask


def needs_access(task: RankTask) -> bool:
    return bool(task.spec.get("script")) and files.local_path(task.checkpoint_url) is None


class StorageAccess:
    """Serves a training process until that process closes its end of the socket. Use each instance
    in only one event loop."""

    def __init__(self, task: RankTask) -> None:
        earlier = [ref.url for ref in task.resume_from]
        self._urls = (task.checkpoint_url, task.artifact_url, *earlier)
        self._ours, self.theirs = socket.socketpair()
        """The training process's end of the socket. This process must close its copy once the
        training process has the descriptor."""
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._ours)
        try:
            while line := await reader.readline():
                number, request = json.loads(line)
                answer = await asyncio.to_thread(answer_to, request, self._urls)
                writer.write(json.dumps([number, answer]).encode() + b"\n")
        except (OSError, ValueError, TypeError):  # the process died, or sent bad or too much data
            pass
        finally:
            writer.close()

    def close(self) -> None:
        self._serving.cancel()


def answer_to(request: Any, urls: Sequence[str]) -> dict[str, Any]:
    """Carry out a request and return the response. Blocks.

    urls: the URLs that the request may access, including everything below them.
    """
    try:
        url = request["url"]
        if not _is_below(url, urls):
            raise PermissionError(f"{url} does not belong to this job")
        match request["op"]:
            case "store":
                return {"done": files.store(Path(request["path"]), url)}
            case "fetch":
                return {"done": files.fetch(url, Path(request["path"]))}
            case "remove_file":
                files.remove_file(url)
                return {"done": None}
            case "remove_folder":
                files.remove_folder(url)
                return {"done": None}
            case other:
                raise ValueError(f"unknown request: {other!r}")
    except FileNotFoundError as error:
        return {"missing": str(error)}
    except Exception as error:  # storage clients can raise any exception
        return {"error": f"{type(error).__name__}: {error}"}


def _is_below(url: str, urls: Sequence[str]) -> bool:
    is_plain = not {"..", "."} & set(url.split("/"))
    return is_plain and any(url == one or url.startswith(f"{one.rstrip('/')}/") for one in urls)
