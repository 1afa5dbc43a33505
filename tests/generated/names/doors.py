"""The doors by which a case goes in: submits, annotations, and `dray.train` in a rank."""

from __future__ import annotations

import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main
import yaml
from sqlalchemy import func, select

import dray
from dray import errors, train
from dray.cli.app import run
from dray.train import reporting
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Frame, attempt_prefix
from service.db.models import JobRow
from tests.generated.names.drawing import PLAIN, Case
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import log


class Quoting(yaml.SafeDumper):
    """Writes texts in quotes: YAML 1.1 and 1.2 differ in which of them are numbers."""


def _in_quotes(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


Quoting.add_representer(str, _in_quotes)


@dataclass(frozen=True)
class Refusal:
    """What a door said no to."""

    pointer: str
    detail: str


class Doors:
    """Puts cases into a server, and takes what is refused out of them."""

    def __init__(self, server: LiveServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.http = server.client()
        self.sdk = dray.Client(server.url)

    def put(self, case: Case) -> str:
        """The id of a job that has all of the case that was taken, and has succeeded."""
        job_id = self._submit(case)
        self._annotate(job_id, case)
        assert self.server.hands.claim(job_id) is not None
        with self._rank(job_id) as frames:
            self._report(case)
            self._save(case)
        lines = [log(number, line) for number, line in enumerate(case.lines)]
        self.server.hands.report(job_id, 1, [*frames, *lines])
        self.server.succeed(job_id)
        return job_id

    def _submit(self, case: Case) -> str:
        while True:
            before = self._num_jobs()
            answer = self._try(case)
            if isinstance(answer, str):
                assert self._num_jobs() == before + 1
                return answer
            assert self._num_jobs() == before, "a refused document makes no job"
            take_out(case, answer)

    def _num_jobs(self) -> int:
        count = select(func.count()).select_from(JobRow)
        found = self.server.hands.database.read_sync(lambda session: session.scalar(count))
        return found or 0

    def _try(self, case: Case) -> str | Refusal:
        match case.door:
            case "http" | "utf-8":
                return self._post(case)
            case "sdk":
                try:
                    return self.sdk.submit(case.document).id
                except (errors.BadRequest, errors.SpecError) as error:
                    return Refusal(error.pointer or "", error.detail)
            case _:
                return self._by_command(case)

    def _post(self, case: Case) -> str | Refusal:
        text = json.dumps(case.document, ensure_ascii=case.door != "utf-8", allow_nan=True)
        try:
            content = text.encode()
        except UnicodeEncodeError:  # half a character has words in JSON's ASCII alone
            content = json.dumps(case.document).encode()
        headers = {"Content-Type": "application/json"}
        answer = self.http.post("/v1/jobs", content=content, headers=headers)
        if answer.status_code == 201:
            job_id: str = answer.json()["id"]
            return job_id
        assert 400 <= answer.status_code < 500, answer.text
        problem = answer.json()
        return Refusal(problem.get("pointer", ""), problem["detail"])

    def _by_command(self, case: Case) -> str | Refusal:
        """`dray submit` with a file or a program; it must refuse what the API refuses alone."""
        code, out, err = command(self.server.url, "submit", "--json", *self._words(case))
        if code == 0:
            job_id: str = json.loads(out)["id"]
            return job_id
        assert code == 2, err
        if case.door == "program":
            return _of_program(err)
        refusal = self._post(case)
        assert isinstance(refusal, Refusal), f"the command refuses what the API takes: {err}"
        return refusal

    def _words(self, case: Case) -> list[str]:
        path = self.folder / f"job.{case.door}"
        if case.door == "json":
            path.write_text(json.dumps(case.document))
            return [str(path)]
        if case.door == "yaml":
            path.write_text(yaml.dump(case.document, Dumper=Quoting, allow_unicode=True), "utf-8")
            return [str(path)]
        own, script = case.document, case.document["script"]
        (self.folder / "a.py").touch()
        env = [
            word for pair in own["environment"]["env"].items() for word in ("--env", "=".join(pair))
        ]
        name = ["--name", own["name"]] if "name" in own else []
        return [*name, *env, "--code", str(self.folder), "--", "a.py", *script["args"]]

    def _annotate(self, job_id: str, case: Case) -> None:
        """Tags and notes, each by a call or a command of its own."""
        for tag in list(case.tags):
            if not self._changes(job_id, {"add_tags": [tag]}, ("--tag", tag), case.door):
                case.tags.remove(tag)
                case.refused.append(tag)
        if not self._changes(job_id, {"notes": case.notes}, ("--notes", case.notes), case.door):
            case.refused.append(case.notes)
            case.notes = ""

    def _changes(
        self, job_id: str, change: dict[str, Any], words: tuple[str, str], door: str
    ) -> bool:
        place = f"/v1/jobs/{job_id}/annotations"
        before = self.http.get(place).json()
        if door == "program":
            code, _, err = command(self.server.url, "annotate", job_id, *words)
            is_taken, detail = code == 0, err
        else:
            content = json.dumps(change).encode()
            answer = self.http.patch(place, content=content, headers=JSON)
            is_taken, detail = answer.status_code == 200, answer.text
            assert is_taken or answer.status_code == 422, answer.text
        if not is_taken:
            (field,) = change
            assert field in detail, detail
            assert self.http.get(place).json() == before, "a refused change changes nothing"
            assert is_odd(words[1]), f"refused: {words[1]!r}"
        return is_taken

    @contextmanager
    def _rank(self, job_id: str) -> Iterator[list[Frame]]:
        """The process of rank 0; what it reports is in the list afterwards."""
        spool = self.folder / job_id
        artifacts = f"{attempt_prefix(job_id, 1)}/artifacts"
        variables = {
            "DRAY_SPOOL_DIR": str(spool),
            "DRAY_ARTIFACT_URL": self.server.hands.storage.url_of(artifacts),
        }
        frames: list[Frame] = []
        with mock.patch.dict(os.environ, variables):
            yield frames
            reporting.wait_until_written(lambda: None)
        frames += spool_reader.decode("r0.0.metrics", spool_reader.read(spool, 0, 1 << 30))

    def _report(self, case: Case) -> None:
        for key, values in list(case.metrics.items()):
            for step, value in enumerate(values, 1):
                why = refused(functools.partial(train.report, step, {key: value}))
                if why is not None:
                    assert "metric key" in why
                    assert is_odd(key), f"refused: {key!r}"
                    case.refused.append(key)
                    case.metrics.pop(key, None)

    def _save(self, case: Case) -> None:
        file = self.folder / "file"
        for name, content in list(case.files.items()):
            file.write_bytes(content)
            why = refused(functools.partial(train.save_artifact, file, name))
            if why is not None:
                assert "artifact name" in why
                assert is_odd(name.replace("/", "").replace(".", "")), f"refused: {name!r}"
                case.refused.append(name)
                del case.files[name]


def refused(call: Callable[[], object]) -> str | None:
    """The words of a call's ValueError; None if it was taken."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


_get_command = functools.cache(typer.main.get_command)
"""To make the tree of commands takes far longer than to run one."""
JSON = {"Content-Type": "application/json"}


def command(url: str, *words: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of `dray` in this process."""
    out, err = io.StringIO(), io.StringIO()
    once = mock.patch("typer.main.get_command", _get_command)
    with once, redirect_stdout(out), redirect_stderr(err):
        code = run(["--url", url, *words])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def _of_program(err: str) -> Refusal:
    found = re.search(r"\(at (/.*?)\)$", err, re.MULTILINE | re.DOTALL)
    assert found is not None, f"an error names its field: {err}"
    return Refusal(found[1], err)


def is_odd(text: Any) -> bool:
    """Whether a door may refuse a text: a short one of letters and digits it may not."""
    return not (isinstance(text, str) and 0 < len(text) <= 63 and set(text) <= set(PLAIN))


def take_out(case: Case, refusal: Refusal) -> None:
    """Remove what the pointer of a refusal names, which must be odd."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in refusal.pointer.split("/")[1:]]
    assert parts, f"a refusal names its field: {refusal}"
    place: Any = case.document
    *parents, last = parts
    for part in parents:
        assert part in place or isinstance(place, list), refusal
        place = place[int(part)] if isinstance(place, list) else place[part]
    key: Any = int(last) if isinstance(place, list) else last
    found = place[key]
    if isinstance(found, dict | list) and found:
        # The field names a key, or all items together.
        odd = [one for one in found if is_odd(one)]
        assert odd, f"nothing of {found} is odd: {refusal}"
        case.refused += map(repr, odd)
        for one in odd:
            found.remove(one) if isinstance(found, list) else found.pop(one)
        return
    assert is_odd(found) or is_odd(key), f"{found!r} is refused: {refusal}"
    case.refused.append(repr(found))
    del place[key]
