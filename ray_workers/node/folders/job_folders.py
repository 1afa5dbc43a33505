"""The folders of a script on a node: DRAY_OUTPUT_DIR and DRAY_CHECKPOINT_DIR.

The output folder on each node belongs to one attempt. Once no process of the attempt is left on the
node, the node's agent copies the files to the storage and reports them as artifacts, even if the
ranks were killed. The plan of an attempt is stored in a file next to the attempt's folders, so that
a restarted agent can complete the work. The service requests this work if the supervisor is gone.

If the storage is a folder, the checkpoint folder is a subfolder of the storage, and all nodes share
this subfolder. For other storage, `ray_workers.node.folders.folder_mirror` maintains a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dray.input.names import unfit
from dray.train import files, saved_files, storage_faults
from dray.train.spool import SpoolWriter
from ray_workers.node.folders.code_cache import CodeCache
from ray_workers.node.folders.left_behind import left_behind
from ray_workers.shared import spool_reader
from ray_workers.shared.folders.work_dir import checkpoint_dir, output_dir
from ray_workers.shared.frames import ArtifactReport
from ray_workers.shared.paths import code_dir
from ray_workers.shared.spool_reader import spool_key

MAX_FILES = 20_000
"""Maximum number of files that are kept per node."""
MAX_NAME_CHARS = 1000
"""Maximum length of an artifact's name, without the prefix that identifies the node
(`service.ingest.rank_frames`)."""
LIMIT = "DRAY_OUTPUT_LIMIT_BYTES"
NAMED = 5
"""Maximum number of files that a message lists."""
THREADS = 4
_BEGAN = "began"
"""Name of an empty file that is written when the attempt begins on this node."""
_PLAIN = re.compile(r"[A-Za-z0-9._/=+-]+", re.ASCII)


@dataclass(frozen=True)
class FolderPlan:
    """The URLs to which a node copies a script's files, and the limits on these files."""

    rank: int
    """The first rank on the node, to which reports are attributed."""
    node_rank: int
    output_url: str
    """URL in the storage for the files of the attempt's output folders."""
    folder_url: str
    """URL for the files of the job's checkpoint folder."""
    spool_limit_bytes: int
    limit_bytes: int
    """Maximum total size of the files in the attempt's output folders."""
    code: str
    """Digest of the code in the job's directory; empty for a script that is already on the
    nodes."""


@dataclass(frozen=True)
class FilesKept:
    """The result of copying a node's output folder."""

    num_kept: int
    problem: str | None
    """Why files that could be kept are missing from the storage; None if all of them were
    stored."""
    left_out: str
    """A message about files that can't be kept; empty if there are none."""
    left_behind: str
    """A message about files in the working directory; empty if there are none."""


def begin(folder: Path, plan: FolderPlan) -> None:
    """Create the folders of an attempt on this node. folder: their parent folder."""
    output_dir(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    checkpoint_dir(folder, plan.folder_url).mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):  # the attempt may return to the node
        (folder / _BEGAN).touch(exist_ok=False)
    partial = folder / "plan.partial"
    partial.write_text(json.dumps(asdict(plan)))
    partial.replace(folder / "plan.json")


def plan_in(folder: Path) -> FolderPlan | None:
    """Return the plan of the attempt; None if the attempt has no folders on this node."""
    try:
        found = json.loads((folder / "plan.json").read_text())
    except FileNotFoundError:
        return None
    return FolderPlan(**found)


class OutputFiles:
    """The files in a folder and its subfolders that can be kept, keyed by relative path. If there
    are too many files, the files in the deepest folders are left out.

    Files whose names are not plain text are also left out, and so are links that point outside the
    folder, sockets, pipes and devices. A link to a file in the folder counts as a separate file.
    Links to folders are not followed: files inside this folder are found without such links.

    Each file counts with its full length, because the holes of sparse files are stored as zeros. If
    the total size is too large, the largest files are left out.
    """

    def __init__(self, folder: Path, limit_bytes: float = math.inf) -> None:
        self._root = folder.parent.resolve() / folder.name
        self._refused: list[str] = []
        self._num_refused = 0
        self.files: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        """Sizes of the files in bytes, keyed by name."""
        if self._root.is_symlink():
            self._refuse(".", "the folder was replaced by a link")
            return
        for name, path in sorted(self._found(), key=lambda found: (found[0].count("/"), found)):
            if len(self.files) < MAX_FILES:
                self.files[name] = path
            else:
                self._refuse(name, f"more than {MAX_FILES} files")
        self.sizes = {name: path.stat().st_size for name, path in self.files.items()}
        self._leave_out_above(limit_bytes)

    def _leave_out_above(self, limit_bytes: float) -> None:
        """limit_bytes: the part of the limit that the files of other nodes don't use."""
        total = sum(self.sizes.values())
        for name in sorted(self.sizes, key=self.sizes.__getitem__, reverse=True):
            if total <= limit_bytes:
                return
            size = self.sizes.pop(name)
            del self.files[name]
            total -= size
            self._refuse(
                name, f"{size:,} bytes, but only {limit_bytes:,} of {LIMIT} are left", is_first=True
            )

    def _found(self) -> Iterator[tuple[str, Path]]:
        for at, _, names in os.walk(self._root):
            for entry in names:
                path = Path(at, entry)
                name = str(path.relative_to(self._root))
                why = self._why_not(path, name)
                if why is None:
                    yield name, path
                else:
                    self._refuse(name, why)

    def _why_not(self, path: Path, name: str) -> str | None:
        if len(name) > MAX_NAME_CHARS:
            return f"a path of more than {MAX_NAME_CHARS} characters"
        if "\\" in name or unfit(name) is not None:
            return "a name that can't be displayed"
        try:
            target = path.resolve(strict=True)
            if not target.is_relative_to(self._root):
                return "a link that points outside the folder"
            return None if stat.S_ISREG(target.stat().st_mode) else "not a regular file"
        except (OSError, RuntimeError):  # a broken or circular link
            return "a link to nothing"

    def _refuse(self, name: str, why: str, *, is_first: bool = False) -> None:
        self._num_refused += 1
        self._refused.insert(0 if is_first else len(self._refused), f"{name[:100]!a} ({why})")
        del self._refused[NAMED:]

    @property
    def left_out(self) -> str:
        if not self._refused:
            return ""
        files_ = "1 file" if self._num_refused == 1 else f"{self._num_refused} files"
        more = " ..." if self._num_refused > len(self._refused) else ""
        return f"{files_} of DRAY_OUTPUT_DIR can't be kept: {', '.join(self._refused)}{more}"


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the files of the attempt's output folder that can be kept, with their sizes in
    bytes."""
    plan = plan_in(folder)
    return OutputFiles(output_dir(folder), math.inf if plan is None else plan.limit_bytes).sizes


def keep_output(
    folder: Path,
    spool_dir: Path,
    taken: Collection[str],
    num_bytes: int = 0,
    work_dir: Path | None = None,
    on_wait: Callable[[str], None] = lambda sentence: None,
) -> FilesKept:
    """Copy the files of the output folder to the storage and report them. Repeated calls have no
    further effect.

    spool_dir: the attempt's spools on this node. taken: names of files of other nodes; files on
    this node with the same names get the prefix `node-N/`. num_bytes: total size of the files on
    the nodes that come before this node; these files use up the limit first. work_dir: the
    directory in which the script ran. on_wait: called from another thread, with a message for the
    user, while the storage doesn't accept files. Blocks, and waits for the storage like
    `save_artifact`."""
    plan, done = plan_in(folder), folder / "kept.json"
    if plan is None:
        return FilesKept(0, None, "", "")
    if done.exists():
        return FilesKept(**json.loads(done.read_text()))
    listing = OutputFiles(output_dir(folder), max(0, plan.limit_bytes - num_bytes))
    kept = _keep(plan, listing, spool_dir, frozenset(taken), on_wait)
    if work_dir is not None:
        kept = replace(kept, left_behind=_left_behind(folder, plan, work_dir))
    partial = folder / "kept.partial"
    partial.write_text(json.dumps(asdict(kept)))
    partial.replace(done)
    return kept


def _left_behind(folder: Path, plan: FolderPlan, work_dir: Path) -> str:
    code = CodeCache(code_dir()).files_of(plan.code) if plan.code else None
    if plan.code and code is None:
        return ""  # it is unknown which files the script wrote
    try:
        since_ns = (folder / _BEGAN).stat().st_mtime_ns
        return left_behind(work_dir, since_ns, code, saved_files.noted(folder))
    except OSError:
        return ""


def _keep(
    plan: FolderPlan,
    listing: OutputFiles,
    spool_dir: Path,
    taken: Collection[str],
    on_wait: Callable[[str], None],
) -> FilesKept:
    deadline = time.monotonic() + storage_faults.WAIT_S

    def keep(name: str, path: Path) -> ArtifactReport:
        url = f"{plan.output_url}/{plan.node_rank}/{_key_of(name)}"
        size_bytes, sha256 = _store(path, url, deadline, on_wait)
        shown = f"node-{plan.node_rank}/{name}" if name in taken else name
        return ArtifactReport(path=shown, url=url, size_bytes=size_bytes, sha256=sha256)

    reports: list[ArtifactReport] = []
    problem = None
    with ThreadPoolExecutor(THREADS) as pool:
        tasks = [pool.submit(keep, name, path) for name, path in listing.files.items()]
        for task in tasks:
            try:
                reports.append(task.result())
            except Exception as error:  # storage clients can raise any exception
                problem = f"{type(error).__name__}: {error}"
                pool.shutdown(cancel_futures=True)
                break
    if not _report(plan, reports, spool_dir):
        problem = "the disk of the node has no space for the reports"
    return FilesKept(len(reports), problem, listing.left_out, "")


def _key_of(name: str) -> str:
    """Return the file's path in the storage: its name, unless a URL would change the name."""
    is_plain = _PLAIN.fullmatch(name) and all(len(part) <= 200 for part in name.split("/"))
    return name if is_plain else f"~{hashlib.sha256(name.encode()).hexdigest()}"


def _store(
    path: Path, url: str, deadline: float, on_wait: Callable[[str], None]
) -> tuple[int, str]:
    while True:
        try:
            return files.store(path, url)
        except storage_faults.StorageError as error:
            if time.monotonic() > deadline:
                raise
            on_wait(
                "can't write the files in DRAY_OUTPUT_DIR to the storage; retrying for "
                f"at most {storage_faults.WAIT_S:g} s: {error}"
            )
            time.sleep(storage_faults.PAUSE_S)


def _report(plan: FolderPlan, reports: list[ArtifactReport], spool_dir: Path) -> bool:
    """Write the reports to a new spool. Returns whether all reports are on the node's disk. The
    spool is new because an agent that died while it wrote the reports may have left a spool that no
    other process can continue."""
    for number in range(1000):
        path = spool_dir / spool_key(plan.rank, 0, f"output{number}")
        if not path.exists():
            break
    spool = SpoolWriter(path, limit_bytes=plan.spool_limit_bytes)
    for report in reports:
        spool.append(report.KIND, report.body(), vital=True)
    deadline = time.monotonic() + storage_faults.WAIT_S
    while not spool.flush() and time.monotonic() < deadline:
        time.sleep(storage_faults.PAUSE_S)
    is_written = not spool.num_waiting
    spool.close()
    return is_written


def remove(folder: Path) -> None:
    """Delete the folders of an attempt."""
    spool_reader.remove(folder)
