"""The node's cache is filled once for all processes, bounded, and never removed while in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dray.spec import Data
from dray.train.storage_faults import StorageError
from ray_workers.datasets import open_table, open_text
from ray_workers.datasets.sources.node_cache import NodeCache
from ray_workers.datasets.sources.source import Source
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.integration.harness import ROOT
from tests.marks import SOAK, soak
from tests.unit.datasets.web import Answer, serving

RANKS = """
import json, os, sys, traceback
from dray.spec import Data
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.datasets import open_table
policy = json.loads(sys.argv[2])
policy["private_hosts"] = tuple(policy["private_hosts"])
data = Data(source=sys.argv[1], format="csv", target="y")

def rank():
    try:
        print(open_table(data, DataPolicy(**policy), classifies=True).fingerprint, flush=True)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1

ranks = []
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(rank())
    ranks.append(pid)
print([os.waitpid(pid, 0)[1] for pid in ranks])
"""


def test_ranks_that_start_together_fetch_and_prepare_once(policy: DataPolicy) -> None:
    policy = replace(policy, private_hosts=("127.0.0.1",))
    rows = "".join(f"{number},{number % 3}\n" for number in range(50_000))
    with serving() as web:
        web.answers["/t.csv"] = Answer(f"x,y\n{rows}".encode(), headers={"ETag": '"1"'})
        ended = subprocess.run(
            [sys.executable, "-c", RANKS, web.url("/t.csv"), json.dumps(asdict(policy))],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        *outputs, codes = ended.stdout.splitlines()
        assert codes == "[0, 0, 0]", ended.stderr
        assert (len(outputs), len(set(outputs))) == (3, 1)
        assert web.count("/t.csv") == 4, "three requests for the headers and one transfer"
    root = Path(policy.cache_dir or "")
    assert len(list((root / "prepared").iterdir())) == 1
    assert list((root / "scratch").iterdir()) == []


@pytest.mark.parametrize("name", ["locks", "index", "objects", "prepared", "scratch"])
def test_a_folder_that_another_user_may_have_filled_is_refused_and_is_no_fault_of_the_data(
    tmp_path: Path, policy: DataPolicy, name: str
) -> None:
    planted = Path(policy.cache_dir or "", name)
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    data = write(tmp_path / "t.txt", "a")
    with pytest.raises(StorageError, match=f"{name} can be written to by .*DRAY_DATA_CACHE_DIR"):
        open_text(data, policy, None)


def test_folders_that_others_could_only_read_are_closed_to_them(
    tmp_path: Path, policy: DataPolicy
) -> None:
    root = Path(policy.cache_dir or "")
    (root / "prepared").mkdir(parents=True, mode=0o755)
    NodeCache.of(policy)
    assert {path.stat().st_mode & 0o777 for path in root.iterdir()} == {0o700}


def write(path: Path, text: str) -> Data:
    path.write_text(text)
    return Data(source=path.as_uri())


def test_a_local_file_is_hashed_once_until_it_changes(
    tmp_path: Path, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    look = Source._hash
    monkeypatch.setattr(
        Source, "_hash", lambda self, file: (read.append(file.name), look(self, file))[1]
    )
    data = write(tmp_path / "a.txt", "one")
    first = open_text(data, policy, None)
    assert open_text(data, policy, None).fingerprint == first.fingerprint
    assert read == ["a.txt"]
    assert list(Path(policy.cache_dir or "", "objects").iterdir()) == [], "it is not copied"
    write(tmp_path / "a.txt", "two!")
    assert bytes(open_text(data, policy, None).ids) == b"two!"
    assert len(read) == 2
    assert open_text(write(tmp_path / "b.txt", "one"), policy, None).fingerprint == (
        first.fingerprint
    )


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, policy: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.txt", "one")
    files = Source.files

    def rewriting(self: Source, content: object) -> object:
        write(tmp_path / "a.txt", "other")
        return files(self, content)  # type: ignore[arg-type]

    monkeypatch.setattr(Source, "files", rewriting)
    with pytest.raises(DataError, match=r"a\.txt: changed while it was being read"):
        open_text(data, policy, None)
    assert list(Path(policy.cache_dir or "", "prepared").iterdir()) == []


def fill(cache: NodeCache, key: str, size_bytes: int, age_s: float) -> Path:
    with cache.scratch() as scratch:
        (scratch / key).write_bytes(b"x" * size_bytes)
        path = cache.add("objects", key, scratch / key)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=250)
    paths = [fill(cache, f"file{age}", 100, age_s=age) for age in (30, 20, 10, 0)]
    cache.sweep()
    assert all(path.exists() for path in paths), "all are in use"
    for path in paths[1:]:
        cache.release(path)
    cache.sweep()
    assert [path.exists() for path in paths] == [True, False, False, True]
    cache.release(paths[0])
    cache.sweep(free_bytes=100)
    assert [path.exists() for path in paths] == [False, False, False, True]
    assert cache.hold("objects", "file0") == paths[3]
    assert cache.hold("objects", "file10") is None
    cache.release(paths[3])


def test_what_is_there_already_stays_the_one_that_is_in_use(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=1000)
    path = fill(cache, "key", 10, age_s=0)
    inode = path.stat().st_ino
    cache.release(path)
    assert fill(cache, "key", 10, age_s=0) == path
    assert path.stat().st_ino == inode
    cache.release(path)


HOLDER = """
import sys
from pathlib import Path
from ray_workers.datasets.sources.node_cache import NodeCache
cache = NodeCache(Path(sys.argv[1]), 0)
with cache.scratch() as scratch:
    (scratch / "made").write_text("x")
    made = cache.add("objects", "key", scratch / "made")
    print("holding", flush=True)
    sys.stdin.readline()
"""


@SOAK
def test_what_another_process_uses_stays_and_what_it_left_when_it_died_goes(
    tmp_path: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    cache = NodeCache(tmp_path, limit_bytes=0)
    cache.sweep()
    assert (tmp_path / "objects" / "key").exists()
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    cache.sweep()
    assert not (tmp_path / "objects" / "key").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_data_in_use_survive_a_full_cache(tmp_path: Path, policy: DataPolicy) -> None:
    small = replace(policy, cache_limit_bytes=3 << 20)
    first = open_text(write(tmp_path / "a.txt", "a" * (2 << 20)), small, None)
    second = open_text(write(tmp_path / "b.txt", "b" * (2 << 20)), small, None)
    assert (first.ids[-1], second.ids[-1]) == (ord("a"), ord("b"))
    prepared = Path(small.cache_dir or "", "prepared")
    assert len(list(prepared.iterdir())) == 2
    NodeCache.of(small).release(prepared / first.fingerprint)
    open_text(write(tmp_path / "c.txt", "c" * (1 << 20)), small, None)
    assert first.fingerprint not in {path.name for path in prepared.iterdir()}
    assert bytes(open_text(Data(source=(tmp_path / "a.txt").as_uri()), small, None).ids[:2]) == (
        b"aa"
    )


@pytest.fixture
def guarded(tmp_path: Path, policy: DataPolicy) -> DataPolicy:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.csv").write_text("x,y\n1,a\n2,b\n")
    return replace(policy, file_roots=(str(tmp_path / "data"),))


def test_no_link_leads_out_of_the_allowed_folders(tmp_path: Path, guarded: DataPolicy) -> None:
    (tmp_path / "data" / "ok.csv").write_text("x,y\n1,a\n2,b\n")
    (tmp_path / "data" / "near.csv").symlink_to("ok.csv")
    (tmp_path / "data" / "far.csv").symlink_to("../secret.csv")
    (tmp_path / "data" / "up").symlink_to("..")
    for name in ("ok.csv", "near.csv"):
        data = Data(source=(tmp_path / "data" / name).as_uri(), target="y")
        assert len(open_table(data, guarded, classifies=True).target) == 2
    for name in ("far.csv", "up/secret.csv", "%2e%2e/secret.csv"):
        data = Data(source=f"file://{tmp_path}/data/{name}", target="y")
        with pytest.raises(DataError, match=r"is outside the folders .*DRAY_DATA_ROOTS"):
            open_table(data, guarded, classifies=True)


def test_links_within_a_folder_of_files_are_followed_within_it_only(
    tmp_path: Path, guarded: DataPolicy
) -> None:
    folder = tmp_path / "data" / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    data = Data(source=folder.as_uri(), format="text")
    assert bytes(open_text(data, guarded, None).ids) == b"a\n"
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DataError, match="is outside the folders"):
        open_text(data, guarded, None)


def test_a_link_to_a_folder_is_not_passed_over(tmp_path: Path, policy: DataPolicy) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "class").symlink_to(tmp_path / "real")
    with pytest.raises(DataError, match="set/class: is a link to a folder"):
        open_text(Data(source=(tmp_path / "set").as_uri(), format="text"), policy, None)


def test_a_link_to_nothing_is_named(tmp_path: Path, policy: DataPolicy) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"set/a\.txt: is a broken link"):
        open_text(Data(source=(tmp_path / "set").as_uri(), format="text"), policy, None)


def test_a_folder_where_one_file_is_meant(tmp_path: Path, policy: DataPolicy) -> None:
    with pytest.raises(DataError, match="is a folder, but this format requires a single file"):
        open_table(Data(source=tmp_path.as_uri(), format="csv", target="y"), policy,
                   classifies=True)  # fmt: skip
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("a")
    data = Data(source=(tmp_path / "set").as_uri(), format="text", size_bytes=1)
    with pytest.raises(DataError, match=r"data\.size_bytes and data\.sha256 only apply to a"):
        open_text(data, policy, None)


def test_only_files_are_read(tmp_path: Path, policy: DataPolicy) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for source in ((tmp_path / "pipe.txt").as_uri(), "file:///dev/zero"):
        with pytest.raises(DataError, match="is neither a file nor a folder"):
            open_text(Data(source=source, format="text"), policy, None)


LARGE = """
import json, resource, sys
from pathlib import Path
import numpy as np
import pyarrow.csv, pyarrow.parquet
from dray.spec import Data
from dray.train.storage_faults import StorageError
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.datasets import open_table, open_text
from ray_workers.datasets.formats.prepared import prepare

def data_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) << 10

headroom = int(sys.argv[3])
# What a process may have of its own; files that are mapped don't count.
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + headroom, resource.RLIM_INFINITY))
try:
    bytearray(2 * headroom)
except MemoryError:
    print("limited")
source, policy = Path(sys.argv[1]).as_uri(), DataPolicy.open(sys.argv[2])
if not source.endswith(".txt"):
    table = open_table(Data(source=source, target="y"), policy, classifies=True)
    arrays = (table.numeric, table.categories, table.target)
else:
    arrays = (open_text(Data(source=source), policy, None).ids,)
rows = np.random.default_rng(0).integers(0, len(arrays[0]), 4096)
print(json.dumps({
    "mapped": [isinstance(array, np.memmap) for array in arrays],
    "bytes": sum(array.nbytes for array in arrays),
    "sum": float(sum(np.take(array, rows, axis=0).astype(np.float64).sum() for array in arrays)),
}))
"""


def write_large(path: Path) -> None:
    """Write a table of some 240 MB once prepared."""
    random = np.random.default_rng(0)
    match path.suffix:
        case ".csv":
            block = "".join(
                f"{n * 0.25},{n % 101},{'red' if n % 2 else 'blue'},{n % 3}\n"
                for n in range(100_000)
            )
            with path.open("w") as file:
                file.write("a,b,colour,y\n")
                for _ in range(115):
                    file.write(block)
        case ".parquet":  # one row group, the largest unit that a writer may make
            count = 12_000_000
            numbers = {name: random.random(count) for name in ("a", "b")}
            colours = pyarrow.DictionaryArray.from_arrays(np.arange(count) % 2, ["red", "blue"])
            table = pyarrow.table({**numbers, "colour": colours, "y": np.arange(count) % 3})
            pyarrow.parquet.write_table(table, path, row_group_size=count)
        case ".npz":  # the targets alone exceed the limit
            count = 22_000_000
            np.savez(path, x=random.integers(0, 99, count, np.uint8), y=np.arange(count) % 3)
        case _:
            with path.open("w") as file:
                for _ in range(300):
                    file.write("one line of a long text, ä\n" * 40_000)


@SOAK
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
@pytest.mark.parametrize("kind", [soak("csv"), soak("parquet"), soak("npz"), "txt"])
def test_a_set_larger_than_memory_is_prepared_and_read(
    kind: str, tmp_path: Path, policy: DataPolicy
) -> None:
    headroom = 160 << 20  # Arrow takes a constant 120 to 140 MB of it, however large the file
    path = tmp_path / f"large.{kind}"
    write_large(path)
    ended = subprocess.run(
        [sys.executable, "-c", LARGE, str(path), policy.cache_dir or "", str(headroom)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    limited, found = ended.stdout.splitlines()
    assert limited == "limited"
    result = json.loads(found)
    assert all(result["mapped"])
    assert result["bytes"] > 1.3 * headroom, "a set that would have fitted shows nothing"
    assert result["sum"] > 0
