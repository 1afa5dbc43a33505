"""The series of a script's runs keep their names through all attempts of its job."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.train import files as stored_files
from dray.train.storage_faults import StorageError
from ray_workers.node.found_metrics.files import MetricFiles
from ray_workers.node.found_metrics.lines import FoundPoint
from ray_workers.node.found_metrics.runs import Run, RunNames, form_of
from ray_workers.node.found_metrics.stored_names import MAX_NAMES, StoredNames

CSV = frozenset(("csv",))


class Attempts:
    """A job whose attempts run in new directories, as on other nodes."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._number = 0
        self.url = str(home / "storage" / "series-names" / "rank-00000.json")

    def begin(self, *, keep: bool = False) -> None:
        """keep: use the directory of the attempt before."""
        self._number += not keep
        self.work = self._home / str(self._number)
        self.work.mkdir(exist_ok=True)
        self._found = MetricFiles([self.work], CSV, 0.0, StoredNames(self.url))

    def write(self, run: str, *values: float) -> dict[str, list[float]]:
        """Append rows to a run's table; returns the values that are found, by series."""
        path = self.work / run / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a") as file:
            file.write("step,acc\n" if is_new else "")
            file.writelines(f"{step},{value}\n" for step, value in enumerate(values))
        return self.read()

    def read(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        points = self._found.read()
        while self._found.has_more:
            points += self._found.read()
        for point in points:
            found.setdefault(point.key, []).append(point.value)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Attempts:
    attempts = Attempts(tmp_path)
    attempts.begin()
    return attempts


def test_a_script_that_resumes_in_its_second_fold_does_not_mix_it_with_the_first(
    job: Attempts,
) -> None:
    assert job.write("fold0", 0.1, 0.2) == {"acc": [0.1, 0.2]}
    job.begin()
    assert job.write("fold1", 0.3) == {"fold1/acc": [0.3]}
    job.begin()
    assert job.write("fold0", 0.4) == {"acc": [0.4]}
    assert job.write("fold1", 0.5) == {"fold1/acc": [0.5]}
    assert job.write("fold2", 0.6) == {"fold2/acc": [0.6]}


def test_folds_keep_their_names_whichever_comes_first(job: Attempts) -> None:
    for fold in range(3):
        job.write(f"logs/fold{fold}", fold)
    job.begin(keep=True)
    assert job.write("logs/fold1", 0.7) == {"acc": [0], "fold1/acc": [1, 0.7], "fold2/acc": [2]}


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("lightning_logs/version_0", "lightning_logs/version_1"),
        ("tb/20261128-024826", "tb/20261129-120000"),
        ("outputs/2026-11-28/02-48-26", "outputs/2026-11-29/12-00-00"),
        (f"runs/Nov28_02-48-26_{socket.gethostname()}", "runs/Nov29_12-00-00_*"),
        ("runs/detect/train", "runs/detect/train2"),
        ("runs/detect/train", "runs/detect/train-2"),
    ],
)
def test_a_run_that_is_begun_anew_in_a_numbered_or_dated_folder_carries_its_series_on(
    job: Attempts, first: str, again: str
) -> None:
    assert job.write(first, 0.1) == {"acc": [0.1]}
    job.begin()
    assert job.write(again, 0.2) == {"acc": [0.2]}
    (late,) = job.write(first, 0.3)
    assert late != "acc", "the other run has carried the series on"


def test_of_several_earlier_runs_none_is_carried_on_by_a_run_like_all_of_them(
    job: Attempts,
) -> None:
    job.write("version_0", 0.1)
    assert job.write("version_1", 0.2) == {"version_1/acc": [0.2]}
    job.begin()
    assert job.write("version_2", 0.3) == {"version_2/acc": [0.3]}


@pytest.mark.parametrize("pair", [("fold0", "fold1"), ("lr_1", "lr_10"), ("a/1", "a/2")])
def test_folders_that_a_user_numbers_are_runs_of_their_own(pair: tuple[str, str]) -> None:
    assert form_of(("job", pair[0])) != form_of(("job", pair[1]))


def test_names_are_stored_before_the_first_point_is_returned(job: Attempts) -> None:
    job.write("fold0", 0.1)
    (entry,) = json.loads(Path(job.url).read_text())
    assert (entry["run"], entry["key"], entry["name"]) == (["job", "fold0"], "acc", "acc")
    written = Path(job.url).stat().st_mtime_ns
    job.write("fold0", 0.2)
    assert Path(job.url).stat().st_mtime_ns == written, "it is written for new names alone"


def test_a_storage_that_fails_costs_no_point(
    job: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no")

    with monkeypatch.context() as broken:
        broken.setattr(stored_files, "read", refuse)
        broken.setattr(stored_files, "store", refuse)
        assert job.write("fold0", 0.1) == {"acc": [0.1]}
    job.write("fold0", 0.2)
    job.begin()
    assert job.write("fold1", 0.3) == {"fold1/acc": [0.3]}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "{}", "null", '[{"run": [], "form": "", "key": "a", "name": "b"}]',
     '[{"run": ["job"], "form": 1, "key": "a", "name": "b"}]', "[" * 5000,
     '[{"run": ["job"], "form": "", "key": "a", "name": "\\u0000"}]'],
)  # fmt: skip
def test_a_file_that_something_else_wrote_names_nothing(tmp_path: Path, text: str) -> None:
    url = tmp_path / "names.json"
    url.write_text(text)
    assert StoredNames(str(url)).load() == []


def test_the_file_stays_small(tmp_path: Path) -> None:
    names = RunNames()
    run = ("job", "x" * 200)
    points = [FoundPoint(f"k{number}", 1, 1.0) for number in range(2 * MAX_NAMES)]
    names.named([(run, points)])
    stored = StoredNames(url := str(tmp_path / "names.json"))
    stored.save(names.given(MAX_NAMES))
    assert Path(url).stat().st_size < 1 << 20
    assert len(StoredNames(url).load()) == MAX_NAMES


RUNS: list[Run] = [("job", "fold0"), ("job", "fold1"), ("job", "a", "fold0"), ("output",)]
LOOKS = st.lists(
    st.lists(st.tuples(st.sampled_from(RUNS), st.sampled_from(["acc", "loss"])), max_size=4),
    max_size=6,
)


@given(st.lists(LOOKS, min_size=1, max_size=4))
def test_no_two_runs_ever_share_a_series(
    attempts: Sequence[Sequence[Sequence[tuple[Run, str]]]],
) -> None:
    names = RunNames()
    owner_of: dict[str, tuple[Run, str]] = {}
    name_of: dict[tuple[Run, str], str] = {}
    for looks in attempts:
        for look in looks:
            found = names.named([(run, [FoundPoint(key, 1, 0.0)]) for run, key in look])
            for series, point in zip(look, found, strict=True):
                assert owner_of.setdefault(point.key, series) == series
                assert name_of.setdefault(series, point.key) == point.key
        names = RunNames(names.given(MAX_NAMES))
