"""Puts generated sweeps into a server, and compares their trials with the input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from dray import errors
from dray.spec import JobSpec
from ray_workers.training.process.rank_main import environment
from tests.generated.names.doors import JSON, Quoting
from tests.generated.names.exits import bits, is_harmless, quoted
from tests.generated.names.sites import Caller, Sites
from tests.generated.names.sweeps import SweepCase, as_text, take_out, variable
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics
from tests.wire import rank_task

MOST_REFUSALS = 40


class Sweeps:
    """Puts a sweep into a server, runs its trials and reads them."""

    def __init__(self, server: LiveServer, caller: Caller, folder: Path, case: SweepCase) -> None:
        self.server = server
        self.caller = caller
        self.folder = folder
        self.case = case

    def submit(self) -> str:
        """Return the id of the sweep with the accepted parts of the case."""
        for _ in range(MOST_REFUSALS):
            answer = self._try()
            if "array_id" in answer:
                return str(answer["array_id"])
            take_out(self.case, answer["pointer"])
        raise AssertionError("it is refused again and again")

    def _try(self) -> dict[str, Any]:
        document, door = self.case.document, self.case.door
        if door == "sdk":
            try:
                return self.caller.sdk.submit(document).model_dump(mode="json")
            except (errors.BadRequest, errors.SpecError) as error:
                return {"pointer": error.pointer}
        if door in ("json", "yaml"):
            path = self.folder / f"sweep.{door}"
            as_yaml = yaml.dump(document, Dumper=Quoting, allow_unicode=True, sort_keys=False)
            path.write_text(json.dumps(document) if door == "json" else as_yaml, "utf-8")
            code, out, _ = self.caller.command("submit", "--json", str(path))
            if code == 0:
                found: dict[str, Any] = json.loads(out)
                return found
        answer = self.caller.http.post("/v1/jobs", content=json.dumps(document), headers=JSON)
        assert answer.status_code < 500, answer.text
        assert answer.status_code != 201 or door not in ("json", "yaml"), "the command refused it"
        refusal: dict[str, Any] = answer.json()
        return refusal

    def check(self, sweep_id: str) -> None:
        case, trials = self.case, self._trials(sweep_id)
        assert [trial["parameters"] for trial in trials] == case.combinations
        assert typed([trial["parameters"] for trial in trials]) == typed(case.combinations)
        for trial, values in zip(trials, case.combinations, strict=True):
            self._trial_is(trial["job_id"], values)
        for trial, value in zip(trials, case.reports, strict=False):
            frame = metrics(1, {case.metric: value}, at=self.server.hands.now)
            self.server.hands.report(trial["job_id"], 1, [frame])
            self.server.succeed(trial["job_id"])
        self._values_are(sweep_id)
        self._is_shown(sweep_id, [trial["job_id"] for trial in trials])

    def _trials(self, sweep_id: str) -> list[dict[str, Any]]:
        found = self.caller.get(f"/v1/sweeps/{sweep_id}/trials", limit=100)["items"]
        given = {name: {"choices": of} for name, of in self.case.values.items()}
        stored = self.caller.get(f"/v1/sweeps/{sweep_id}")["sweep"]["parameters"]
        kept = {name: {"choices": of["choices"]} for name, of in stored.items()}
        assert typed(kept) == typed(given)
        assert list(stored) == list(given), "the last one changes first"
        return list(found)

    def _trial_is(self, job_id: str, values: dict[str, Any]) -> None:
        """Check its arguments, the variables of its ranks, and a search for it."""
        args = [self.case.argument(pieces, values) for pieces in self.case.args]
        job = self.caller.get(f"/v1/jobs/{job_id}")
        assert job["spec"]["script"]["args"] == args
        claimed = self.server.hands.claim(job_id)
        assert claimed is not None
        assert typed(dict(claimed.parameters)) == typed(values)
        task = rank_task(parameters=claimed.parameters, spec=job["spec"])
        variables = environment(task, JobSpec.model_validate(job["spec"]))
        for name, value in values.items():
            assert variables[variable(name)] == as_text(value)
        for at, word in enumerate(args):
            if len(word) < 3000:
                condition = f"script.args[{at}] = {quoted(word)}"
                found = self.caller.get("/v1/jobs", where=condition)["items"]
                assert job_id in [one["id"] for one in found], condition

    def _values_are(self, sweep_id: str) -> None:
        """Each trial has the value that it reported, and the best trial is named."""
        for trial in self.caller.sdk.trials(sweep_id):
            reported = self.case.reports[trial.index]
            # SQLite stores -0.0 as 0.0. Adding 0.0 does the same.
            known = None if trial.value is None else bits(trial.value + 0.0)
            assert known == (bits(reported + 0.0) if math.isfinite(reported) else None)
            assert trial.is_best == (trial.index == self.case.best)
        best = self.caller.get(f"/v1/sweeps/{sweep_id}")["best"]
        assert (best and best["index"]) == self.case.best

    def _is_shown(self, sweep_id: str, job_ids: list[str]) -> None:
        """Check the commands, a comparison, and a frame."""
        code, out, err = self.caller.command("sweep", "show", "--json", "--by-index", sweep_id)
        assert code == 0, err
        shown = [trial["parameters"] for trial in json.loads(out)["trials"]]
        assert typed(shown) == typed(self.case.combinations)
        code, out, err = self.caller.command("sweep", "show", sweep_id)
        assert code == 0, err
        assert is_harmless(out)
        assert all(name in out for name in self.case.values)
        if len(job_ids) > 1:
            self._is_compared(job_ids)

    def _is_compared(self, job_ids: list[str]) -> None:
        """The columns of a frame and of a comparison show what differs between the trials."""
        found = self.caller.sdk.compare(job_ids)
        assert [job.id for job in found.jobs] == job_ids
        frame = self.caller.sdk.frame(job_ids)
        options = {
            pieces[0][1].strip("-="): pieces[1][1]
            for pieces in self.case.args
            if pieces[0][1].startswith("--")
            and [kind for kind, _ in pieces] == ["text", "value"]
            and pieces[1][1] in self.case.values  # not a parameter that was refused
        }
        before = [pieces for pieces in self.case.args if ("text", "--") in pieces]
        for option, name in options.items() if not before else ():
            texts = [as_text(values[name]) for values in self.case.combinations]
            if len(set(texts)) < 2 or any(len(text) > 255 for text in texts):
                continue
            (difference,) = [
                one for one in found.differences if one.pointer == f"/parameters/{option}"
            ]
            for values in (difference.values, list(frame[f"parameters.{option}"])):
                assert all(map(is_same, values, texts)), (option, values, texts)


def is_same(value: Any, text: str) -> bool:
    """Whether an argument is read as the value that its text denotes."""
    if isinstance(value, str):
        return value == text
    return float(value) == float({"true": "1", "false": "0"}.get(text.lower(), text))


def typed(value: Any) -> str:
    """Compare as JSON: 1 is not `true`, and -0.0 differs from 0.0."""
    return json.dumps(value, sort_keys=True)


def go_through(sites: Sites, folder: Path, case: SweepCase) -> None:
    with sites.of(None).caller(None) as caller:
        assert caller is not None
        sweep = Sweeps(sites.of(None).server, caller, folder, case)
        sweep.check(sweep.submit())
