"""Media that a script reports reach a spool of their own, and never end or delay the training."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import train
from dray.media.kinds import MediaKind
from dray.train import media, reporting
from dray.train.spool import segments
from ray_workers.node.secret_masking import mask_frames
from ray_workers.node.silo_gate import Opening, SiloRules
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.secret_files import Masker
from tests.unit.media import files

EACH_KIND: dict[str, Any] = {
    "histogram": {"weights": torch.arange(9.0)},
    "image": {"sample": torch.zeros(3, 4, 5)},
    "audio": {"voice": ([0, 1, 2], 8000)},
    "text": {"answer": "yes"},
    "table": {"wrong": [{"a": 1}]},
    "confusion_matrix": {"val": ([0, 1], [1, 1])},
    "pr_curve": {"val": ([0, 1], [0.1, 0.2])},
    "roc_curve": {"val": ([0, 1], [0.1, 0.2])},
}


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "r0.0.metrics"))
    monkeypatch.setattr(media, "_left_out", media._LeftOut())
    return tmp_path


def written(spool: Path, stream: str = "media") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for _, path in segments(spool / f"r0.0.{stream}")
        for line in path.read_text().splitlines()
    ]


def test_each_kind_is_a_frame_beside_the_metrics(spool: Path) -> None:
    train.report(7, {"loss": 0.5}, **EACH_KIND)
    (metrics,) = written(spool, "metrics")
    assert metrics["body"] == {"step": 7, "values": {"loss": 0.5}}
    bodies = [frame["body"] for frame in written(spool)]
    assert [body["kind"] for body in bodies] == list(EACH_KIND) == list(MediaKind)
    assert all(body["step"] == 7 and body["left_out"] == 0 for body in bodies)
    assert [body["key"] for body in bodies] == [next(iter(given)) for given in EACH_KIND.values()]
    picture = base64.b64decode(bodies[1]["file"])
    assert picture.startswith(b"\x89PNG")
    (key,) = [path.name for path in spool.iterdir() if path.name.endswith("media")]
    data = spool_reader.read(spool / key, 0, 1 << 20)
    frames = list(spool_reader.decode(key, data))
    assert {(frame.rank, frame.incarnation, frame.kind) for frame in frames} == {
        (0, 0, FrameKind.MEDIA)
    }


def test_media_alone_are_no_step(spool: Path) -> None:
    train.report(3, text={"a": "b"})
    assert written(spool, "metrics") == []
    assert len(written(spool)) == 1


def test_what_cannot_be_stored_is_left_out_counted_and_logged_once(
    spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        train.report(step, {"loss": 1.0}, image={"a": b"<svg>"}, text={"b": "c"})
    assert len(written(spool, "metrics")) == 2
    assert [frame["body"]["left_out"] for frame in written(spool)] == [1, 1]
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "left out" in line]
    assert len(lines) == 1
    assert "the image 'a' of step 1 is left out: the picture is not a PNG" in lines[0]


def test_a_service_that_is_away_costs_pictures_and_no_metrics(
    spool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "STREAM_LIMIT_BYTES", 2 << 20)
    content = files.picture(width=400, height=400)
    for step in range(20):
        train.report(step, {"loss": 1.0}, image={"a": content})
    assert len(written(spool, "metrics")) == 20
    kept = [frame["body"]["step"] for frame in written(spool)]
    assert 3 <= len(kept) < 20
    assert kept == [*range(len(kept))], "the oldest are kept"
    assert "has not received earlier media yet" in "".join(capsys.readouterr())
    directory = spool / "r0.0.media"
    spool_reader.discard(directory, before=sum(p.stat().st_size for _, p in segments(directory)))
    train.report(20, image={"a": content})
    assert written(spool)[-1]["body"]["left_out"] == 20 - len(kept)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"histograms": {"a": [1]}}, TypeError, "unexpected argument 'histograms'"),
        ({"image": b"x"}, TypeError, "must be a mapping"),
        ({"text": {"": "a"}}, ValueError, "metric key"),
        ({"text": {"a\n": "a"}}, ValueError, "metric key"),
        ({"text": {"a": 3}}, TypeError, "must be a str"),
    ],
)
def test_mistakes_of_a_program_are_raised(
    spool: Path, given: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        train.report(1, **given)
    assert written(spool) == []


def test_without_dray_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRAY_SPOOL_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    train.report(1, **EACH_KIND)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_is_masked_in_texts_but_files_stay_whole(spool: Path) -> None:
    content = files.picture()
    encoded = base64.b64encode(content).decode()
    secrets = {"A": "hunter2-hunter2", "B": encoded[10:20]}
    train.report(1, text={"a": "it is hunter2-hunter2"}, image={"b": content})
    data = spool_reader.read(spool / "r0.0.media", 0, 1 << 20)
    masked = mask_frames(data, Masker(secrets))
    text, image = (json.loads(line)["body"] for line in masked.splitlines())
    assert "hunter2" not in text["value"]["text"]
    assert base64.b64decode(image["file"]) == content


@pytest.mark.parametrize("opens", [frozenset(), frozenset({Opening.FILES})])
def test_media_leave_a_silo_only_with_its_files(spool: Path, opens: frozenset[Opening]) -> None:
    train.report(1, text={"a": "a patient"})
    data = spool_reader.read(spool / "r0.0.media", 0, 1 << 20)
    out = SiloRules("north", opens, set()).frames(data)
    assert len(out) == len(data)
    assert (b"a patient" in out) == bool(opens)
