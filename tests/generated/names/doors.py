"""The ways in which a case enters a server: submissions, annotations, queues and webhooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from sqlalchemy import func, select

from dray import errors
from service.db.models import JobRow
from tests.generated.names import ranks
from tests.generated.names.drawing import Case, is_odd
from tests.generated.names.sites import Caller, Sites
from tests.unit.service.helpers import log

JSON = {"Content-Type": "application/json"}
IN_URLS = frozenset(map(chr, range(0x21, 0x7F))) - {"#", "\\"}
"""Characters that the path and the query of a webhook's URL can contain."""


class Quoting(yaml.SafeDumper):
    """Quotes all strings: YAML 1.1 and 1.2 disagree on which unquoted ones are numbers."""


def _in_quotes(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


Quoting.add_representer(str, _in_quotes)


@dataclass(frozen=True)
class Refusal:
    """A part of the case that an entry refused."""

    pointer: str
    detail: str


@contextmanager
def entered(sites: Sites, folder: Path, case: Case) -> Iterator[Doors]:
    """The entries of a case's server, for its user."""
    with sites.of(case.user).caller(case.user) as caller:
        if caller is not None:
            doors = Doors(sites, folder, case, caller)
            try:
                yield doors
            finally:
                doors.close()
            return
    assert is_odd(case.user), f"no token may be called {case.user!r}"
    case.refused.append(f"{case.user}")
    case.user = None
    with entered(sites, folder, case) as doors:
        yield doors


class Doors:
    """Puts a case into a server, and removes what is refused from the case."""

    def __init__(self, sites: Sites, folder: Path, case: Case, caller: Caller) -> None:
        self.sites = sites
        self.site = sites.of(case.user)
        self.server = self.site.server
        self.folder = folder
        self.case = case
        self.caller = caller
        self.http = caller.http
        self.hook_id: str | None = None

    def close(self) -> None:
        """The number of webhooks per user is limited."""
        if self.hook_id is not None:
            answer = self.http.delete(f"/v1/webhooks/{self.hook_id}")
            assert answer.status_code == 204, answer.text

    def put(self) -> str:
        """Return the id of a succeeded job that has all accepted parts of the case."""
        job_id = self.submit()
        self.run(job_id)
        return job_id

    def submit(self) -> str:
        """Return the id of a waiting job."""
        if "queue" in self.case.document:
            self._make_queue(self.case.queue)
        job_id = self._submit(self.case)
        self._annotate(job_id, self.case)
        if self.case.hook is not None:
            self._add_hook(self.case.hook)
        return job_id

    def run(self, job_id: str) -> None:
        """Make the job report everything that its rank provides, and succeed."""
        case, hands = self.case, self.server.hands
        assert hands.claim(job_id) is not None
        spec = self.caller.get(f"/v1/jobs/{job_id}")["spec"]
        frames = ranks.frames_of(self.server, job_id, spec, case)
        lines = [log(number, line) for number, line in enumerate(case.lines)]
        hands.report(job_id, 1, [*frames, *lines])
        self.server.succeed(job_id)

    def _make_queue(self, name: str) -> None:
        """Change it as an admin, by a call or a command. Jobs in a refused queue are refused."""
        if self.case.door != "program":
            answer = self.site.admin.http.put(f"/v1/queues/{quote(name, safe='')}", json={})
            assert answer.status_code < 500, answer.text
            is_made, why = answer.status_code == 200, answer.text
        else:
            words = ("queue", "set", "--max-priority", "100", "--", name)
            code, _, why = self.site.admin.command(*words)
            is_made = code == 0
        assert is_made or is_odd(name) or name != name.lower(), why

    def _add_hook(self, hook: dict[str, Any]) -> None:
        """Create a webhook that is notified of this job, and perhaps of others."""
        labels = self.case.document.get("labels", {}) if hook["labels"] else {}
        queue = self.case.queue if hook["queue"] else None
        hook["url"] = self.sites.receiver.url + hook["path"]
        if self.case.door == "program":
            words = ["webhook", "add", "--json"]
            words += [] if queue is None else [f"--queue={queue}"]
            words += [f"--label={key}={value}" for key, value in labels.items()]
            code, out, why = self.caller.command(*words, "--", hook["url"])
            made = json.loads(out) if code == 0 else None
        else:
            body = {"url": hook["url"], "queue": queue, "labels": labels}
            answer = self.http.post("/v1/webhooks", json=body)
            made = answer.json() if answer.status_code == 201 else None
            why = answer.text
            assert made or answer.json()["pointer"] == "/url", why
        if made:
            self.hook_id = made["id"]
            return
        assert "url" in why
        assert not set(hook["path"]) <= IN_URLS, f"{hook['url']} is refused: {why}"
        self.case.refused.append(hook["path"])
        self.case.hook = None

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
                    return self.caller.sdk.submit(case.document).id
                except (errors.BadRequest, errors.SpecError) as error:
                    return Refusal(error.pointer or "", error.detail)
            case _:
                return self._by_command(case)

    def _post(self, case: Case) -> str | Refusal:
        text = json.dumps(case.document, ensure_ascii=case.door != "utf-8", allow_nan=True)
        try:
            content = text.encode()
        except UnicodeEncodeError:  # only JSON's ASCII form can express a lone surrogate
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
        """Run `dray submit` with a file or a program; it must refuse what the API does."""
        code, out, err = self.caller.command("submit", "--json", *self._words(case))
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
        queue = ["--set", f"queue={json.dumps(own['queue'])}"] if "queue" in own else []
        found = [f"--metric={one['name']}={one['pattern']}" for one in own.get("metrics", ())]
        options = [*name, *queue, *env, *found, "--code", str(self.folder)]
        return [*options, "--", "a.py", *script["args"]]

    def _annotate(self, job_id: str, case: Case) -> None:
        """Set tags and notes, each by its own call or command."""
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
        path = f"/v1/jobs/{job_id}/annotations"
        before = self.http.get(path).json()
        if door == "program" and words[1] != "-":  # which stands for the standard input
            code, _, err = self.caller.command("annotate", job_id, *words)
            is_taken, detail = code == 0, err
        else:
            content = json.dumps(change).encode()
            answer = self.http.patch(path, content=content, headers=JSON)
            is_taken, detail = answer.status_code == 200, answer.text
            assert is_taken or answer.status_code == 422, answer.text
        if not is_taken:
            (field,) = change
            assert field in detail, detail
            assert self.http.get(path).json() == before, "a refused change changes nothing"
            assert is_odd(words[1]), f"refused: {words[1]!r}"
        return is_taken


def _of_program(err: str) -> Refusal:
    found = re.search(r"\(at (/.*?)\)$", err, re.MULTILINE | re.DOTALL)
    assert found is not None, f"an error names its field: {err}"
    return Refusal(found[1], err)


def take_out(case: Case, refusal: Refusal) -> None:
    """Remove what the pointer of a refusal names, which must be unusual."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in refusal.pointer.split("/")[1:]]
    assert parts, f"a refusal names its field: {refusal}"
    if parts[0] == "metrics":
        found = case.document["metrics"].pop(int(parts[1]))
        assert is_odd(found["name"]), f"{found} is refused: {refusal}"
        case.refused.append(found["name"])
        del case.metrics[found["name"]]
        return
    parent: Any = case.document
    *parents, last = parts
    for part in parents:
        assert part in parent or isinstance(parent, list), refusal
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    key: Any = int(last) if isinstance(parent, list) else last
    found = parent[key]
    if isinstance(found, dict | list) and found:
        # The field names a key, or all items together.
        odd = [one for one in found if is_odd(one)]
        assert odd, f"nothing of {found} is odd: {refusal}"
        case.refused += map(repr, odd)
        for one in odd:
            found.remove(one) if isinstance(found, list) else found.pop(one)
        return
    is_upper = key == "queue" and found != found.lower()
    assert is_upper or is_odd(found) or is_odd(key), f"{found!r} is refused: {refusal}"
    case.refused.append(repr(found))
    del parent[key]
