"""Changes from one job to another: document, commit, data, packages and code."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from sqlalchemy.orm import Session

from dray import views
from service.code.uploads import CodeUploads, StoredFile
from service.db.models import JobRow
from service.db.repositories.catalog import packages as packages_repository
from service.db.session import Database
from service.domain.errors import CodeNotFound, NotComparable
from service.domain.tracking.line_diff import MAX_EDITS, is_binary, line_diff
from service.domain.tracking.sources import data_of, git_of
from service.jobs.queries import Queries
from service.jobs.service import found
from service.tracking import comparisons

MAX_FILES: Final = 1000
"""Maximum number of differing files in a response."""
MAX_FILE_BYTES: Final = 512 << 10
"""Lines of larger files are not compared."""
MAX_READ_BYTES: Final = 16 << 20
"""Maximum number of bytes of files that are read for a response."""
MAX_TEXT: Final = 1 << 20
"""Maximum number of characters of changed lines in a response."""
MAX_WORK: Final = 10 * MAX_EDITS**2
"""Maximum sum of the squares of the numbers of edits that are searched for in a response, which is
the work of 10 files whose lines are moved too often. In further files, the lines between the first
and the last difference count as replaced."""


class Changes:
    """The use case. All callers may read the documents and the code of all jobs."""

    def __init__(self, database: Database, queries: Queries, code: CodeUploads) -> None:
        self._database = database
        self._queries = queries
        self._code = code

    async def between(self, old: str, new: str) -> views.JobDiff:
        """Return what changed from the job `old` to the job `new`. Raises NotFound; NotComparable
        if they are the same job; and StorageUnavailable if the code can't be read."""
        if old == new:
            raise NotComparable("a job can't be compared with itself", pointer="/jobs")
        now = self._database.clock()

        def work(session: Session) -> tuple[list[views.ComparedJob], dict[str, Any]]:
            rows = [found(session, job_id) for job_id in (old, new)]
            return comparisons.described(session, rows, now), {
                "document": [
                    one
                    for one in comparisons.document_differences(rows)
                    if not one.pointer.startswith("/origin/")
                ],
                "git": [_commit(row) for row in rows],
                "data": [_data(row) for row in rows],
                "packages": _package_diff(
                    [packages_repository.of_job(session, row.id) for row in rows]
                ),
            }

        jobs, changes = await self._database.read(work)
        return views.JobDiff(jobs=jobs, code=await self._code_diff([old, new]), **changes)

    async def _code_diff(self, job_ids: Sequence[str]) -> views.CodeDiff:
        ids: list[str | None] = []
        notes: list[str] = []
        stored: list[Mapping[str, StoredFile]] = []
        for job_id in job_ids:
            try:
                owner, identity = await self._queries.code_of(job_id)
                stored.append({f.path: f for f in await self._code.files(owner, identity)})
                ids.append(identity)
            except CodeNotFound as error:
                notes.append(error.message)
                ids.append(None)
        if len(stored) < len(job_ids):
            return views.CodeDiff(ids=ids, notes=notes, num_files=0, files=[])
        old, new = stored
        paths = [path for path in sorted(old.keys() | new.keys()) if _differ(old, new, path)]
        budget = _Budget()
        files = [
            await self._file(path, old.get(path), new.get(path), budget)
            for path in paths[:MAX_FILES]
        ]
        return views.CodeDiff(ids=ids, notes=notes, num_files=len(paths), files=files)

    async def _file(
        self, path: str, old: StoredFile | None, new: StoredFile | None, budget: _Budget
    ) -> views.FileDiff:
        sides = [side for side in (old, new) if side is not None]
        change: Literal["added", "removed", "changed"] = "changed"
        if len(sides) == 1:
            change = "added" if old is None else "removed"
        about = views.FileDiff(
            path=path,
            change=change,
            old_bytes=None if old is None else old.size_bytes,
            new_bytes=None if new is None else new.size_bytes,
            is_executable=[side.is_executable for side in sides],
        )
        sizes = [side.size_bytes for side in sides]
        if max(sizes) > MAX_FILE_BYTES:
            return about.model_copy(update={"left_out": "large"})
        if not budget.has_bytes(sum(sizes)):
            return about.model_copy(update={"left_out": "limit"})
        before, after = await self._content(old), await self._content(new)
        if is_binary(before) or is_binary(after):
            return about.model_copy(update={"left_out": "binary"})
        diff = await asyncio.to_thread(line_diff, before, after, budget.max_edits)
        budget.spend(diff.num_tried)
        counts = {"num_added": diff.num_added, "num_removed": diff.num_removed}
        if not budget.has_text(len(diff.text)):
            return about.model_copy(update={**counts, "left_out": "limit"})
        return about.model_copy(update={**counts, "text": diff.text})

    async def _content(self, file: StoredFile | None) -> bytes:
        return b"" if file is None else b"".join([piece async for piece in self._code.pieces(file)])


class _Budget:
    """Tracks how much a response may still read and contain."""

    def __init__(self) -> None:
        self._bytes, self._text, self._work = MAX_READ_BYTES, MAX_TEXT, MAX_WORK

    @property
    def max_edits(self) -> int:
        """Maximum number of edits of a file that may be searched for."""
        return min(MAX_EDITS, math.isqrt(self._work))

    def spend(self, num_edits: int) -> None:
        self._work -= num_edits**2

    def has_bytes(self, number: int) -> bool:
        self._bytes -= number
        return self._bytes >= 0

    def has_text(self, number: int) -> bool:
        if number > self._text:
            return False
        self._text -= number
        return True


def _differ(old: Mapping[str, StoredFile], new: Mapping[str, StoredFile], path: str) -> bool:
    sides = [
        side and (side.is_executable, side.size_bytes, [sha256 for sha256, _ in side.parts])
        for side in (old.get(path), new.get(path))
    ]
    return sides[0] != sides[1]


def _commit(row: JobRow) -> views.CodeCommit | None:
    git = git_of(row.spec)
    if git is None:
        return None
    return views.CodeCommit(commit=git["commit"], dirty=git["dirty"], branch=git["branch"])


def _data(row: JobRow) -> views.DataVersion | None:
    """Return the data of a recipe; None for a script, which reads its own data."""
    if row.spec.get("recipe") is None:
        return None
    sources, sha256 = data_of(row.spec)
    return views.DataVersion(sources=sources, sha256=sha256)


def _package_diff(packages: Sequence[Mapping[str, str] | None]) -> views.PackageDiff:
    is_known = [one is not None for one in packages]
    differences = []
    if all(is_known):
        old, new = ({} if one is None else one for one in packages)
        differences = [
            views.PackageDifference(name=name, versions=[old.get(name), new.get(name)])
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return views.PackageDiff(is_known=is_known, differences=differences)
