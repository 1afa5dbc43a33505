"""Submit jobs, with the code that they bring, and plan them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from dray import functions, views
from dray._clients.base import AsyncCalls, BlockingCalls
from dray._http.code import OnUpload
from dray._http.flows import Spec
from dray.code.packing import PackedCode, pack


class SubmitCalls(BlockingCalls):
    def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> views.Job:
        """Queue a job: a JobSpec, a mapping, or the path of a YAML or JSON document.

        With the same `idempotency_key` (1 to 255 printable ASCII characters) the same document
        creates one job, however often it is submitted. Raises Unprocessable with the pointer to
        the field at fault, Unsatisfiable if the cluster could never run it.
        """
        return self._driver.run(self._flows.submit(spec, idempotency_key))

    def dry_run(self, spec: Spec) -> views.Explanation:
        """Whether and when the job would start if it were submitted now, and what would have it
        start earlier; nothing is stored. Raises what `submit` raises."""
        return self._driver.run(self._flows.dry_run(spec))

    def upload_code(
        self,
        folder: str | PathLike[str] | PackedCode = ".",
        *,
        include: Sequence[str] = (),
        on_progress: OnUpload | None = None,
    ) -> views.Code:
        """Upload the files of a folder, or the result of `dray.code.packing.pack`, for
        `script: {code: ...}` of a job document.

        Files that Git ignores, `.git`, virtual environments, `.env` and private keys are left out,
        except those in `include`. Only parts that the server does not have yet are sent.
        `on_progress(bytes sent, bytes to send)` is called as they go. Raises SpecError for a
        folder that can't be uploaded.
        """
        packed = folder if isinstance(folder, PackedCode) else pack(Path(folder), include)
        return self._driver.run(self._flows.upload_code(packed, on_progress))

    def submit_function(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        spec: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> views.Job:
        """Queue a job whose ranks each call `function(*args, **kwargs)`, as a script would run.

        The function is pickled by cloudpickle (`pip install 'dray[functions]'`) with what it refers
        to in its own module or notebook, and uploaded as code. Nodes need the same minor version of
        Python, and the packages that it imports. `attach(job).result()` is what it returned on rank
        0. The arguments that are numbers or texts are `parameters` of comparisons and frames, so no
        secret belongs among them. spec: other parts of the job document, such as
        `{"environment": {...}}`. Raises SpecError for what can't be pickled, Forbidden where the
        server takes no functions.
        """
        with tempfile.TemporaryDirectory() as folder:
            functions.write(Path(folder), function, args, kwargs or {})
            code = self.upload_code(folder)
        parameters = functions.parameters(function, args, kwargs or {})
        document = functions.document(function, parameters, num_workers, spec, code.id)
        return self.submit(document, idempotency_key=idempotency_key)

    def job_code(self, job_id: str) -> list[views.CodeFile]:
        """The files of the code that the job runs; CodeNotFound if it brought none."""
        return self._driver.run(self._flows.job_code(job_id))

    def download_code(self, job_id: str, dest: str | PathLike[str]) -> list[Path]:
        """Write the code that the job runs below the folder `dest`; the files' paths."""
        return self._driver.run(self._flows.download_code(job_id, dest))

    def plan(
        self,
        spec: Spec,
        *,
        memory_bytes_per_rank: int | None = None,
        flops_per_s: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> views.Plan:
        """Compute memory and expected step time of each way to divide a job; nothing is submitted.

        Arguments default to what the server knows about its cluster, or to typical numbers; the
        plan says which. Raises NotPlannable if the plan would depend on unread data.
        """
        options = {
            "memory_bytes_per_rank": memory_bytes_per_rank,
            "flops_per_s": flops_per_s,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "latency_s": latency_s,
        }
        return self._driver.run(self._flows.plan(spec, options))


class AsyncSubmitCalls(AsyncCalls):
    """See `SubmitCalls`, which has the same arguments, answers and errors."""

    async def submit(self, spec: Spec, *, idempotency_key: str | None = None) -> views.Job:
        return await self._driver.run(self._flows.submit(spec, idempotency_key))

    async def dry_run(self, spec: Spec) -> views.Explanation:
        return await self._driver.run(self._flows.dry_run(spec))

    async def upload_code(
        self,
        folder: str | PathLike[str] | PackedCode = ".",
        *,
        include: Sequence[str] = (),
        on_progress: OnUpload | None = None,
    ) -> views.Code:
        from asyncio import to_thread  # the blocking client does without

        packed = (
            folder
            if isinstance(folder, PackedCode)
            else await to_thread(pack, Path(folder), include)
        )
        return await self._driver.run(self._flows.upload_code(packed, on_progress))

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
        with tempfile.TemporaryDirectory() as folder:
            functions.write(Path(folder), function, args, kwargs or {})
            code = await self.upload_code(folder)
        parameters = functions.parameters(function, args, kwargs or {})
        document = functions.document(function, parameters, num_workers, spec, code.id)
        return await self.submit(document, idempotency_key=idempotency_key)

    async def job_code(self, job_id: str) -> list[views.CodeFile]:
        return await self._driver.run(self._flows.job_code(job_id))

    async def download_code(self, job_id: str, dest: str | PathLike[str]) -> list[Path]:
        return await self._driver.run(self._flows.download_code(job_id, dest))

    async def plan(
        self,
        spec: Spec,
        *,
        memory_bytes_per_rank: int | None = None,
        flops_per_s: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
        latency_s: float | None = None,
    ) -> views.Plan:
        options = {
            "memory_bytes_per_rank": memory_bytes_per_rank,
            "flops_per_s": flops_per_s,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "latency_s": latency_s,
        }
        return await self._driver.run(self._flows.plan(spec, options))
