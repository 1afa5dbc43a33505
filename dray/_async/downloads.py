"""Download the results and checkpoints of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from os import PathLike
from pathlib import Path

import httpx

from dray import views
from dray._async.calls import Calls
from dray._http import downloads, exports
from dray._http.downloads import OnProgress, RemoteFile
from dray._http.exports import ModelFormat
from dray._http.transport import Call, no_answer, segment


class DownloadCalls(Calls):
    async def checkpoints(self, job_id: str) -> list[views.Checkpoint]:
        """Return the job's stored checkpoints."""
        return await self._list(views.CheckpointPage, f"/v1/jobs/{segment(job_id)}/checkpoints")

    async def artifacts(self, job_id: str) -> list[views.Artifact]:
        """Return the files of the job's result."""
        return await self._list(views.ArtifactPage, f"/v1/jobs/{segment(job_id)}/artifacts")

    async def download(
        self,
        job_id: str,
        dest: str | PathLike[str],
        artifact: str | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download all artifacts, or the artifact with the given id or path, into the folder
        `dest`.

        An interrupted download continues where it stopped. A file gets its final name only after
        its SHA-256 digest has been verified. `on_progress(path, bytes_downloaded, size_bytes)` is
        called during the download. Returns the paths of the files. Raises IntegrityError if a file
        is damaged.
        """
        found = await self.artifacts(job_id)
        files = downloads.artifact_files(job_id, found, artifact)
        return await self._fetch_all(files, dest, on_progress)

    async def download_upload(self, file_id: str, dest: str | PathLike[str]) -> Path:
        """Download a file that was uploaded with OpenAI's client to the path `dest`. Returns the
        path. Raises NotFound if there is no such file, or if it belongs to another user."""
        call = Call("GET", f"/openai/v1/files/{segment(file_id)}/content")
        response = await self._send(call, patient=True)
        path = Path(dest)
        await asyncio.to_thread(path.write_bytes, response.content)
        return path

    async def export(
        self,
        job_id: str,
        dest: str | PathLike[str],
        form: ModelFormat = "safetensors",
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download a fine-tuned model into the folder `dest`, in the same way as `download`.

        form: `safetensors` for the complete model, which `dray.load` and `from_pretrained` of
        transformers read, or `adapter` for the adapter, which peft reads. Returns the paths of the
        files. Raises ValueError if the result doesn't have the format.
        """
        files = downloads.artifact_files(job_id, await self.artifacts(job_id), None)
        chosen = exports.exported([file.path for file in files], form)
        wanted = [replace(file, path=chosen[file.path]) for file in files if file.path in chosen]
        return await self._fetch_all(wanted, dest, on_progress)

    async def checkpoint_files(self, job_id: str, step: int) -> list[views.CheckpointFile]:
        """Return the files of the checkpoint at `step`. Raises CheckpointNotFound if there is no
        such checkpoint."""
        return await self._list(
            views.CheckpointFilePage, f"/v1/jobs/{segment(job_id)}/checkpoints/{step}/files"
        )

    async def download_checkpoint(
        self,
        job_id: str,
        step: int,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download the checkpoint at `step` into the folder `dest`, in the same way as
        `download`."""
        found = await self.checkpoint_files(job_id, step)
        files = downloads.checkpoint_files(job_id, step, found)
        return await self._fetch_all(files, dest, on_progress)

    async def _fetch_all(
        self,
        files: Iterable[RemoteFile],
        dest: str | PathLike[str],
        on_progress: OnProgress | None,
    ) -> list[Path]:
        """Download the files, and return their paths under `dest`. All paths are checked before the
        download begins."""
        root = Path(dest)
        targets = [(file, downloads.destination(root, file.path)) for file in files]
        for file, target in targets:
            await self._fetch(file, target, on_progress or (lambda _path, _done, _total: None))
        return [target for _, target in targets]

    async def _fetch(self, file: RemoteFile, target: Path, report: OnProgress) -> None:
        """Download a file. The data is first written to a hidden `.part` file next to the target.
        This file is renamed after its hash has been verified."""
        if await asyncio.to_thread(downloads.matches, target, file):
            report(file.path, file.size_bytes, file.size_bytes)
            return
        part = target.with_name(f".{target.name[:40]}.{file.sha256[:16]}.part")
        offset = await asyncio.to_thread(downloads.begin, part, file.size_bytes)
        retry = self._connection.patient
        fruitless = 0
        silent_since: float | None = None
        while offset < file.size_bytes:
            fruitless += 1
            broken: httpx.RequestError | None = None
            call = downloads.range_call(file, offset)
            async with aclosing(await self._send(call, patient=True)) as response:
                if response.status_code != 206:
                    offset = 0  # range ignored or file changed: the complete file follows
                try:
                    async for piece in response.aiter_bytes():
                        await asyncio.to_thread(downloads.write_at, part, offset, piece)
                        offset += len(piece)
                        fruitless, silent_since = 0, None
                        report(file.path, min(offset, file.size_bytes), file.size_bytes)
                        if offset > file.size_bytes:
                            break
                except httpx.RequestError as error:
                    broken = error
            if broken is None:
                break  # the body is complete
            silent_since = retry.clock() if silent_since is None else silent_since
            if retry.clock() - silent_since > retry.patience_s:
                raise no_answer(broken, self._connection.url)
            await asyncio.sleep(retry.delay_s(fruitless + 1, None))
        await asyncio.to_thread(downloads.finish, part, target, file)
