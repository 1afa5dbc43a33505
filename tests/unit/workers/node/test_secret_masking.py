"""No frame, error or stack leaves its node with the value of a secret, in any field."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.train.spool import SpoolWriter
from ray_workers.node import agent
from ray_workers.node.secret_masking import EXACT, mask_frames, note_secrets
from ray_workers.shared import frame_fields, frames, paths, spool_reader
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.node_needs import EnvironmentPolicy
from ray_workers.shared.secret_files import Masker
from tests.unit.workers.node.test_agent import node_agent

CANARY = 'canary "77" é'
MASKER = Masker({"TOKEN": CANARY})
REPORTS = [
    each
    for each in vars(frames).values()
    if isinstance(each, type) and issubclass(each, frames.Report) and each is not frames.Report
]


def filled(kind: Any) -> Any:
    """A value of a field's type, with the canary wherever text is possible."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(
            kind, {**vars(frames), **vars(frame_fields), "OnDivergence": str}
        )
        return {
            field.name: f"own-{field.name}" if field.name in EXACT else filled(types[field.name])
            for field in dataclasses.fields(kind)
        }
    if origin in (Mapping, dict):
        return {f"key {CANARY}": filled(parts[1])}
    if origin in (Sequence, list, tuple):
        return [filled(parts[0])]
    if kind is Any:
        return [{CANARY: f"say {CANARY}."}]
    if parts:  # a union
        return filled(str if str in parts else parts[0])
    return f"say {CANARY}." if issubclass(kind, str) else kind(1)


def line_of(kind: FrameKind, body: Any) -> bytes:
    return json.dumps({"kind": kind, "time": 1.5, "body": body}, separators=(",", ":")).encode()


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)
def test_every_text_of_every_frame_is_masked_and_lines_keep_their_length(report: Any) -> None:
    body = filled(report)
    line = line_of(report.KIND, body) + b"\n"
    masked = mask_frames(line, MASKER)
    assert len(masked) == len(line)
    assert masked.endswith(b"\n")
    found = list(spool_reader.decode("r0.0.metrics", masked))
    if report is frames.ArtifactReport:
        assert found == [], "its file's address has the name"
        return
    (frame,) = found
    expected = json.dumps(body, ensure_ascii=False).replace(
        json.dumps(CANARY, ensure_ascii=False)[1:-1], "***"
    )
    assert frame.body == json.loads(expected)


def test_frames_without_a_secret_stay_as_they_are_and_no_frame_is_let_through_raw() -> None:
    plain = line_of(FrameKind.METRICS, {"step": 1, "values": {"a": float("nan")}}) + b"\n"
    artifact = line_of(FrameKind.ARTIFACT, {"path": "a", "url": "file:///77"}) + b"\n"
    broken = f"{CANARY} is no frame\n".encode()
    masked = mask_frames(plain + artifact + broken, MASKER)
    assert masked == plain + artifact + b" " * (len(broken) - 1) + b"\n"
    assert mask_frames(broken, Masker({})) == broken


async def test_an_agent_masks_frames_errors_and_stacks_of_the_attempts_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "TOKEN").write_text(CANARY)
    (tmp_path / "TOKEN").chmod(0o600)
    node = node_agent(tmp_path / "node", monkeypatch)
    spools = paths.spool_dir("deployment", "0" * 56, "j", 1)

    def write(kind: FrameKind, body: dict[str, Any]) -> None:
        writer = SpoolWriter(spools / f"r0.0.{kind}", limit_bytes=1 << 20)
        writer.append(kind, body)
        writer.close()

    async def collect(*_: object) -> dict[int, str]:
        return {0: f"in {CANARY}"}

    monkeypatch.setattr(agent.stack_collector, "collect", collect)
    task: Any = SimpleNamespace(
        spec={"environment": {"secrets": ["TOKEN", "GONE"]}},
        spool_dir=str(spools / "r0.0.metrics"),
        environment_policy=replace(EnvironmentPolicy.open(), secrets_dir=str(tmp_path)),
    )
    note_secrets(task)
    note_secrets(task)
    write(FrameKind.METRICS, {"step": 1, "values": {f"train/{CANARY}": 1.0}})
    write(FrameKind.ERROR, {"message": f"refused {CANARY}"})
    read = await node.read("j", 1, {}, 1 << 20, 0.0)
    sizes = {path.parent.name: path.stat().st_size for path in spools.glob("*/*.seg")}
    assert {key: len(data) for key, data in read.data.items()} == sizes
    bodies = [f.body for k, data in read.data.items() for f in spool_reader.decode(k, data)]
    assert bodies == [{"message": "refused ***"}, {"step": 1, "values": {"train/***": 1.0}}]
    assert [frame.body for frame in await node.errors("j", 1)] == [{"message": "refused ***"}]
    assert await node.stacks("j", 1, [0], 1.0) == {0: "in ***"}
    (tmp_path / "TOKEN").unlink()  # it is remembered while the attempt is here
    assert await node.stacks("j", 1, [0], 1.0) == {0: "in ***"}
    await node.drop("j", 1)
    assert not spools.exists()
