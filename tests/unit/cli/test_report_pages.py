"""Reports over HTTP, in the SDK and on the command line."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import dray
from dray import errors
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli, OnTerminal
from tests.unit.service.helpers import metrics

TEXT = "# Rates\n\n```chart\nmetrics: val/loss\nwhere: labels.test = 'reports'\n```\n"


@pytest.fixture(scope="module")
def run(server: LiveServer) -> str:
    job_id = server.submit(name="a run", labels={"test": "reports"})
    server.train(job_id, metrics(1, {"val/loss": 0.5}), metrics(2, {"val/loss": 0.25}))
    server.succeed(job_id)
    return job_id


def editor(folder: Path, script: str) -> str:
    path = folder / "editor"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_report_is_written_shown_exported_and_deleted(cli: Cli, run: str, tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    file.write_text(TEXT)
    report_id = cli("report", "create", "Learning rates", str(file), "--project", "vision").strip()
    assert cli("report", "show", report_id) == TEXT
    head, row = cli("report", "ls", "--project", "vision").splitlines()
    assert head.split() == ["ID", "TITLE", "OWNER", "PROJECT", "VERSION", "CHANGED"]
    assert row.split()[:3] == [report_id, "Learning", "rates"]
    assert cli.json("report", "ls", "--owner", "nobody") == []
    out = tmp_path / "report.html"
    cli("report", "export", report_id, "--html", str(out), "--values")
    page = out.read_text()
    assert "a run: 2 points, 0.5 at 1 to 0.25 at 2" in page
    assert "<details>" in page
    assert "<details>" not in cli("report", "export", report_id, "--html", "-")
    cli("report", "export", report_id, "--html", str(tmp_path / "none" / "x"), exits=2)
    assert "can't write" in cli.err
    cli("report", "rm", report_id, exits=2)
    assert "Delete the report 'Learning rates' of " in cli.err
    assert "confirm with --yes" in cli.err
    cli("report", "rm", report_id, "--yes")
    cli("report", "show", report_id, exits=3)
    assert "there is no report" in cli.err
    cli("report", "create", "x", str(tmp_path / "missing"), exits=2)
    file.write_bytes(b"\xff")
    cli("report", "create", "x", str(file), exits=2)
    assert "is not UTF-8 text" in cli.err
    file.write_text("```chart\n```")
    cli("report", "create", "x", str(file), exits=2)
    assert "line 1: the chart has no fields" in cli.err


def test_a_report_is_edited(
    cli: Cli, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.md"
    file.write_text("one\n")
    report_id = cli("report", "create", "Edited", str(file)).strip()
    file.write_text("two\n")
    found = cli.json("report", "edit", report_id, "--file", str(file), "--title", "New")
    assert (found["version"], found["text"], found["title"]) == (2, "two\n", "New")
    cli("report", "edit", report_id, "--title", "Late", "--version", "1", exits=3)
    assert "its version is now 2, not 1" in cli.err
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    cli("report", "edit", report_id, exits=2)
    assert "set EDITOR" in cli.err
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("EDITOR", editor(tmp_path, 'echo three >> "$1"'))
    cli("report", "edit", report_id)
    assert "stored version 3" in cli.err
    assert cli("report", "show", report_id) == "two\nthree\n"
    monkeypatch.setenv("EDITOR", editor(tmp_path, "true"))
    cli("report", "edit", report_id)
    assert "nothing was changed" in cli.err
    assert not list(tmp_path.glob("dray-report-*"))
    monkeypatch.setenv("EDITOR", editor(tmp_path, "exit 3"))
    cli("report", "edit", report_id, exits=2)
    assert "exit code 3; your text is in" in cli.err
    monkeypatch.setenv("EDITOR", str(tmp_path / "missing"))
    cli("report", "edit", report_id, exits=2)
    assert "can't run" in cli.err
    # Another user changes the report while the editor is open.
    path = f"{server.url}/v1/reports/{report_id}"
    body = '{"version": 3, "text": "theirs"}'
    other = f"curl -sf -X PATCH -H 'Content-Type: application/json' -d '{body}' {path} >/dev/null"
    monkeypatch.setenv("EDITOR", editor(tmp_path, f'echo mine >> "$1"; {other}'))
    for left in tmp_path.glob("dray-report-*"):
        left.unlink()
    cli("report", "edit", report_id, exits=3)
    (kept,) = tmp_path.glob("dray-report-*")
    assert f"your text is in {kept}" in cli.err
    assert kept.read_text() == "two\nthree\nmine\n"
    assert cli("report", "show", report_id) == "theirs\n"


def test_a_deletion_is_confirmed_on_a_terminal(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    (tmp_path / "x.md").write_text("x")
    report_id = cli("report", "create", "Kept", str(tmp_path / "x.md")).strip()
    terminal = OnTerminal("--url", server.url, "report", "rm", report_id)
    terminal.until(lambda shown: "Delete the report" in shown)
    terminal.type("n\n")
    terminal.until(lambda shown: "nothing was changed" in shown)
    assert terminal.end() == 130
    assert cli("report", "show", report_id) == "x\n"


@pytest.fixture
def with_tokens(tmp_path: Path) -> Iterator[LiveServer]:
    lines = [
        f"{name}:{hashlib.sha256(name.encode()).hexdigest()}{role}"
        for name, role in (("ann", ""), ("bob", ""), ("eve", ":admin"))
    ]
    (tmp_path / "tokens").write_text("\n".join(lines))
    with serving(tmp_path / "home", tokens_file=tmp_path / "tokens") as server:
        yield server


def test_other_users_read_a_report_but_only_its_owner_and_admins_change_it(
    with_tokens: LiveServer,
) -> None:
    url = with_tokens.url
    with (
        dray.Client(url, "ann") as ann,
        dray.Client(url, "bob") as bob,
        dray.Client(url, "eve") as eve,
    ):
        report = ann.create_report("Ann's", "text", project="vision")
        assert report.owner == "ann"
        assert bob.report(report.id) == report
        page = bob.export_report(report.id)
        assert "by ann. bob exported it at" in page
        with pytest.raises(errors.Forbidden, match="belongs to ann"):
            bob.change_report(report.id, version=1, text="mine")
        with pytest.raises(errors.Forbidden):
            bob.delete_report(report.id)
        found = eve.change_report(report.id, version=1, project="")
        assert (found.version, found.project, found.updated_by) == (2, None, "eve")
        with pytest.raises(errors.ReportChanged) as caught:
            ann.change_report(report.id, version=1, text="old")
        assert caught.value.status == 412
        assert [one.id for one in ann.reports(owner="@me", page_size=1)] == [report.id]
        assert list(bob.reports(owner="@me")) == []
        eve.delete_report(report.id)
        for missing in (report.id, "é", "preview"):
            with pytest.raises(errors.ReportNotFound):
                bob.report(missing)


def test_bad_bodies_are_refused_and_store_nothing(with_tokens: LiveServer) -> None:
    with dray.Client(with_tokens.url, "ann") as ann:
        report = ann.create_report("t" * 300, "x" * 65_536)
        wrong = [
            lambda: ann.create_report(""),
            lambda: ann.create_report("t" * 301),
            lambda: ann.create_report("a\nb"),
            lambda: ann.create_report("x", "x" * 65_537),
            lambda: ann.create_report("x", "a\0b"),
            lambda: ann.create_report("x", project=""),
            lambda: ann.change_report(report.id, version=0, text=""),
            lambda: ann.change_report(report.id, version=2**53, text=""),
            lambda: ann.change_report(report.id, version=1),
        ]
        for call in wrong:
            with pytest.raises(errors.BadRequest):
                call()
        assert [one.id for one in ann.reports()] == [report.id]
        assert ann.report(report.id).version == 1


def test_the_file_can_do_nothing_in_a_browser(with_tokens: LiveServer) -> None:
    with dray.Client(with_tokens.url, "ann") as ann:
        report = ann.create_report("x")
    headers = {"Authorization": "Bearer ann"}
    answer = with_tokens.ask("GET", f"/v1/reports/{report.id}/html", headers=headers)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{report.id}.html"'
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert policy.endswith("frame-ancestors 'none'; sandbox")
    assert with_tokens.ask("GET", f"/v1/reports/{report.id}/html").status_code == 401
