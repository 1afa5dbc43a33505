"""Submit and plan jobs, and upload their code."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dray import functions, views
from dray._async.calls import Calls
from dray._http import code as code_archives
from dray._http.code import OnUpload
from dray._http.transport import Call, params, present, segment
from dray.code.local import packed_code, with_code, with_upload
from dray.code.packing import PackedCode, pack
from dray.errors import IntegrityError

if TYPE_CHECKING:  # most commands don't need the document's classes or YAML
    from dray.spec import JobSpec

Spec: TypeAlias = "JobSpec | Mapping[str, Any] | str | PathLike[str]"

MAX_ROUNDS = 3
"""Maximum number of times that missing parts are sent. Sending the parts once is usually enough,
but parts can be deleted or lost while other parts are sent."""


class SubmitCalls(Calls):
    async def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> views.Job:
        """Submit a job, given as a JobSpec, a mapping, or the path of a YAML or JSON document.

        A document that is submitted repeatedly with the same `idempotency_key` (1 to 255 printable
        ASCII characters) creates only one job. Raises Unprocessable with a pointer to the invalid
        field, and Unsatisfiable if the cluster could never run the job.
        """
        document = await self._uploaded(spec)
        # All retries use the same key, so that a lost response doesn't cause a second job.
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        call = Call.with_json("POST", "/v1/jobs", document, headers={"Idempotency-Key": key})
        return await self._read(views.Job, call)

    async def _uploaded(self, spec: Spec) -> Any:
        """Return the document to send, after uploading the folder that the document names as its
        code."""
        document, base = _document(spec)
        packed = await asyncio.to_thread(packed_code, document, base)
        if packed is None:
            return document
        await self._upload(packed, None)
        return with_upload(document, packed)

    async def dry_run(self, spec: Spec) -> views.Explanation:
        """Explain whether and when the job would start if it were submitted now, and which changes
        would make it start earlier. Nothing is stored. Raises the same exceptions as `submit`."""
        document = with_code(_document(spec)[0], None)  # nothing is uploaded
        call = Call.with_json("POST", "/v1/jobs", document, params(dry_run=True))
        return await self._read(views.Explanation, call)

    async def upload_code(
        self,
        folder: str | PathLike[str] | PackedCode = ".",
        *,
        include: Sequence[str] = (),
        on_progress: OnUpload | None = None,
    ) -> views.Code:
        """Upload the files of a folder, or the result of `dray.code.packing.pack`, for use as
        `script: {code: ...}` in a job document.

        Files that Git ignores, `.git`, virtual environments, `.env` and private keys are skipped
        unless `include` names them. Only parts that the server does not have are sent.
        `on_progress(bytes_sent, bytes_total)` is called during the upload. Raises SpecError if the
        folder can't be uploaded.
        """
        if not isinstance(folder, PackedCode):
            folder = await asyncio.to_thread(pack, Path(folder), include)
        return await self._upload(folder, on_progress)

    async def _upload(self, packed: PackedCode, on_progress: OnUpload | None) -> views.Code:
        """Send the parts that the server does not have, and return the uploaded code."""
        describe = code_archives.described(packed)
        code = await self._read(views.Code, describe, patient=True)
        for _ in range(MAX_ROUNDS):
            if code.is_complete:
                return code
            sent, total = 0, sum(packed.size_of(part) for part in code.missing)
            for batch in code_archives.batches(packed, code.missing):
                body, size = await asyncio.to_thread(code_archives.as_tar, packed, batch)
                headers = {"Content-Type": "application/x-tar"}
                call = Call("POST", "/v1/code/parts", (), headers, body)
                await self._send(call, patient=True)
                sent += size
                if on_progress is not None:
                    on_progress(sent, total)
            code = await self._read(views.Code, describe, patient=True)
        if not code.is_complete:
            raise IntegrityError("the server did not keep the uploaded parts of the code")
        return code

    async def submit_function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        spec: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> views.Job:
        """Submit a job in which each rank calls `function(*args, **kwargs)`, like a script.

        The function is pickled with cloudpickle (`pip install 'dray[functions]'`), including the
        objects of its module or notebook that it uses, and uploaded as code. The nodes need the
        same minor version of Python, and the packages that the function imports.
        `attach(job).result()` returns the result of rank 0. Arguments that are numbers or strings
        are shown as `parameters` in comparisons and data frames, so don't pass secrets. spec: other
        parts of the job document, such as `{"environment": {...}}`. Raises SpecError if an object
        can't be pickled, and Forbidden if the server doesn't accept functions.
        """
        with tempfile.TemporaryDirectory() as folder:
            functions.write(Path(folder), function, args, kwargs or {})
            code = await self.upload_code(folder)
        parameters = functions.parameters(function, args, kwargs or {})
        document = functions.document(function, parameters, num_workers, spec, code.id)
        return await self.submit(document, idempotency_key=idempotency_key)

    async def job_code(self, job_id: str) -> list[views.CodeFile]:
        """Return the files of the job's uploaded code. Raises CodeNotFound if the job has no
        uploaded code."""
        return await self._list(views.CodeFilePage, f"/v1/jobs/{segment(job_id)}/code")

    async def download_code(self, job_id: str, dest: str | PathLike[str]) -> list[Path]:
        """Download the job's uploaded code into the folder `dest`. Returns the paths of the
        files."""
        call = Call("GET", f"/v1/jobs/{segment(job_id)}/code/archive")
        response = await self._send(call, patient=True)
        return await asyncio.to_thread(code_archives.unpack, response.content, Path(dest))

    async def plan(
        self,
        spec: Spec,
        *,
        memory_bytes_per_rank: int | None = None,
        flops_per_s: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> views.Plan:
        """Compute the memory and the expected step time for each way to parallelize a job across
        its workers. Nothing is submitted.

        The arguments default to the speeds that the server has measured on its cluster, or to
        typical values. The plan states which values were used. Raises NotPlannable if the plan
        would depend on data that the server has not read.
        """
        options = present(
            memory_bytes_per_rank=memory_bytes_per_rank,
            flops_per_s=flops_per_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            latency_s=latency_s,
        )
        document = with_code(_document(spec)[0], None)
        return await self._read(
            views.Plan, Call.with_json("POST", "/v1/plan", {**document, **options})
        )


def _document(spec: Spec) -> tuple[Any, Path]:
    """Return (document, folder): the document to send, without defaults, and the folder to which
    the paths in the document are relative."""
    from dray.documents import folder_of, load_document
    from dray.spec import JobSpec

    if isinstance(spec, JobSpec):
        return {"version": spec.version, **spec.as_given()}, Path()
    if isinstance(spec, Mapping):
        return dict(spec), Path()
    return load_document(spec), folder_of(spec)
