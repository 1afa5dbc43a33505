"""What changed between two jobs, with Git as the oracle for code."""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dray import views
from dray.cli.commands.changes import patch_of
from dray.code.manifest import PART_BYTES, FileEntry
from ray_workers.shared.contracts import FrameKind
from service.domain.errors import NotComparable, NotFound
from service.tracking import changes
from service.tracking.changes import Changes
from tests.seeds import drawn
from tests.unit.service.helpers import Service, frame

COMMIT = "1a" * 20
Tree = Mapping[str, tuple[bytes, bool]]
"""Files by path: their content, and whether they are executable."""


@pytest.fixture
def found(service: Service) -> Changes:
    return Changes(service.database, service.queries, service.jobs.code)


async def uploaded(service: Service, files: Tree, owner: str = "ann") -> str:
    parts: dict[str, bytes] = {}
    entries = []
    for path, (content, is_executable) in files.items():
        pieces = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
        hashes = [hashlib.sha256(piece).hexdigest() for piece in pieces]
        parts |= dict(zip(hashes, pieces, strict=True))
        entries.append(FileEntry(path, len(content), is_executable, tuple(hashes)))
    code = await service.jobs.code.describe(entries, owner)
    if code.missing:
        await service.jobs.code.put_parts({sha: parts[sha] for sha in code.missing}, owner)
        code = await service.jobs.code.describe(entries, owner)
    assert code.is_complete
    return code.id


async def job_with(service: Service, files: Tree, **fields: Any) -> str:
    given = {name: (text, False) for name, text in ENTRYPOINT.items()}
    code = await uploaded(service, {**given, **files})
    job, _ = await service.jobs.submit(
        views_spec(script={"entrypoint": "entry.py", "code": code}, **fields),
        owner="ann",
        project="vision",
    )
    return job.id


ENTRYPOINT = {"entry.py": b"pass\n"}


def views_spec(**fields: Any) -> Any:
    from dray.spec import JobSpec

    return JobSpec.model_validate(fields)


def written(folder: Path, files: Tree) -> Path:
    for path, (content, is_executable) in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o755 if is_executable else 0o644)
    folder.mkdir(exist_ok=True)
    return folder


def numstat(folder: Path) -> dict[str, tuple[str, str]]:
    """The lines that Git counts as added and removed, by path; `-` for binary files."""
    command = (
        "git",
        "diff",
        "--no-index",
        "--no-renames",
        "--minimal",
        "--numstat",
        "-z",
        "a",
        "b",
    )
    out = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout.decode()
    words = out.split("\0")
    counts = {}
    for number in range(0, len(words) - 1, 3):
        added, removed, _ = words[number].split("\t")
        old, new = words[number + 1 : number + 3]
        counts[(old if new == "/dev/null" else new)[2:]] = (added, removed)
    return counts


def patched(folder: Path, files: list[views.FileDiff]) -> None:
    """Apply the files' patches to the folder `a` with Git."""
    patch = "\n".join(line for file in files for line in patch_of(file)) + "\n"
    command = ("git", "apply", "--whitespace=nowarn", "--allow-empty", "-p1", "-")
    done = subprocess.run(
        command, cwd=folder / "a", input=patch.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, (done.stderr.decode(), patch)


NAMES = (
    "a b.py",
    "ü.py",
    "☃/train file.py",
    "deep/er/x",
    'quo"te.txt',
    "tab's.cfg",
    "-dash",
    "data.bin",
)
LINES = (b"x = 1\n", b"y = 2\n", b"\n", b"    return x\r\n", "é ☃\n".encode(), b"# note\n")


def drawn_tree(random_: random.Random) -> Tree:
    def content(name: str) -> bytes:
        text = b"".join(random_.choices(LINES, k=random_.randint(0, 12)))
        if name == "data.bin":
            return text + b"\0" + random_.randbytes(3)
        return text + random_.choice([b"", b"", b"no newline"])

    names = random_.sample(NAMES, random_.randint(1, len(NAMES)))
    return {name: (content(name), random_.random() < 0.2) for name in names}


@pytest.mark.parametrize("seed", drawn(6))
async def test_the_code_changed_as_git_says(
    service: Service, found: Changes, tmp_path: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    old = drawn_tree(random_)
    new = {**drawn_tree(random_), **dict(random_.sample(sorted(old.items()), len(old) // 2))}
    jobs = [await job_with(service, files) for files in (old, new)]
    diff = (await found.between(*jobs)).code
    folder = tmp_path / "trees"
    written(folder / "a", old)
    written(folder / "b", new)
    counts = {
        file.path: ("-", "-")
        if file.left_out == "binary"
        else (str(file.num_added), str(file.num_removed))
        for file in diff.files
        if file.old_bytes != 0 or file.new_bytes != 0 or len(set(file.is_executable)) > 1
    }
    expected = numstat(folder)
    # Git lists no lines for empty files and for changes of the mode alone.
    assert {path: one for path, one in counts.items() if one != ("0", "0")} == {
        path: one for path, one in expected.items() if one != ("0", "0")
    }
    texts = [file for file in diff.files if file.left_out is None]
    patched(folder, texts)
    for path in {*old, *new} - {file.path for file in diff.files if file.left_out}:
        file = folder / "a" / path
        assert file.exists() == (path in new), path
        if path in new:
            assert file.read_bytes() == new[path][0], path
            assert bool(file.stat().st_mode & 0o100) == new[path][1], path
    assert diff.num_files == len(diff.files)
    assert {file.path for file in diff.files} == {
        path for path in {*old, *new} if old.get(path) != new.get(path)
    }


async def test_documents_commits_data_and_packages_are_compared(
    service: Service, found: Changes
) -> None:
    git = {"commit": COMMIT, "dirty": True, "branch": "main"}
    first = await service.running(train={"epochs": 2}, origin={"git": git})
    second = await service.running(train={"epochs": 3}, origin={"job": first})
    diff = await found.between(first, second)
    assert [job.id for job in diff.jobs] == [first, second]
    assert diff.git == [views.CodeCommit(**git), None]
    pointers = {one.pointer: one.values for one in diff.document}
    assert pointers["/train/epochs"] == [2, 3]
    assert not any(pointer.startswith("/origin") for pointer in pointers)
    assert [one and one.sources for one in diff.data] == [["sklearn://digits"]] * 2
    assert diff.packages == views.PackageDiff(is_known=[False, False], differences=[])
    assert diff.code.ids == [None, None]
    assert "was submitted without code" in diff.code.notes[0]

    def packages(**versions: Any) -> Any:
        return frame(FrameKind.PACKAGES, {"packages": versions})

    service.report(first, 1, [packages(numpy="2.3.0", torch="2.13.0", old="1")])
    service.report(second, 1, [packages(numpy="2.3.1", torch="2.13.0")])
    diff = await found.between(first, second)
    assert diff.packages.is_known == [True, True]
    assert {one.name: one.versions for one in diff.packages.differences} == {
        "numpy": ["2.3.0", "2.3.1"],
        "old": ["1", None],
    }
    service.report(first, 1, [packages(numpy="2.3.1", torch="2.13.0")])
    assert (await found.between(first, second)).packages.differences == []


async def test_packages_of_a_report_are_limited(service: Service, found: Changes) -> None:
    jobs = [await service.running() for _ in range(2)]
    many = {f"p{n}": "v\0" * 100 for n in range(3000)}
    for job_id in jobs:
        service.report(job_id, 1, [frame(FrameKind.PACKAGES, {"packages": many})])
        service.report(job_id, 1, [frame(FrameKind.PACKAGES, {"packages": ["numpy"]})])
    service.report(jobs[1], 1, [frame(FrameKind.PACKAGES, {"packages": {}})])
    differences = (await found.between(*jobs)).packages.differences
    assert len(differences) == 2000
    assert differences[0].versions == ["v␀" * 64, None]


async def test_large_files_and_too_many_are_named_but_not_drawn(
    service: Service, found: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_FILE_BYTES", 50)
    monkeypatch.setattr(changes, "MAX_READ_BYTES", 100)
    monkeypatch.setattr(changes, "MAX_TEXT", 60)
    monkeypatch.setattr(changes, "MAX_FILES", 5)
    old = {f"{name}.txt": (b"old\n", False) for name in "bcdefg"}
    new = {f"{name}.txt": (b"new\n", False) for name in "bcdefg"}
    old["a.txt"] = (b"x" * 51, False)
    jobs = [await job_with(service, files) for files in (old, new)]
    diff = (await found.between(*jobs)).code
    assert diff.num_files == 7
    assert [(file.path, file.left_out) for file in diff.files] == [
        ("a.txt", "large"),
        ("b.txt", None),
        ("c.txt", None),
        ("d.txt", "limit"),
        ("e.txt", "limit"),
    ]
    assert diff.files[0].num_added is None
    assert (diff.files[3].num_added, diff.files[3].text) == (1, None)


async def test_the_work_for_many_files_is_limited(
    service: Service, found: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file, 8 edits are needed; the lines of later files count as replaced."""
    monkeypatch.setattr(changes, "MAX_WORK", 2 * 8**2 + 3)
    old, new = b"a\nb\nc\nd\nx\n", b"x\nd\nc\nb\na\n"
    names = [f"{name}.txt" for name in "abcd"]
    jobs = [await job_with(service, dict.fromkeys(names, (text, False))) for text in (old, new)]
    files = (await found.between(*jobs)).code.files
    assert [file.num_added for file in files] == [4, 4, 5, 5]


async def test_a_job_is_compared_with_another_one_that_exists(
    service: Service, found: Changes
) -> None:
    job_id = await service.submit()
    with pytest.raises(NotComparable):
        await found.between(job_id, job_id)
    for pair in ((job_id, "job-none"), ("a\0b", job_id)):
        with pytest.raises(NotFound):
            await found.between(*pair)
