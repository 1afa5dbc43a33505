"""Creates the folders of a script on all nodes of an attempt, and stores the files in these folders
when the attempt ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Set
from dataclasses import replace
from typing import Any

from ray_workers.node.folders.job_folders import FilesKept, FolderPlan
from ray_workers.shared.contracts import AttemptSpec, Cause, Outcome
from ray_workers.shared.frames import Report
from ray_workers.shared.names import attempt_prefix, folder_url
from ray_workers.shared.node_needs import CodeRef, RemoteCodeRef
from ray_workers.shared.supervisor_frames import WaitingReport
from ray_workers.supervision.node_clients import CodeUnavailable, NodeClients
from ray_workers.supervision.rules.timings import Timings

AreGivenUp = Callable[[Set[str]], Awaitable[bool]]


class ScriptFolders:
    """Manages the script folders of one attempt. Recipes have no script folders."""

    def __init__(
        self,
        spec: AttemptSpec,
        nodes: NodeClients,
        timings: Timings,
        report: Callable[[Report], None],
    ) -> None:
        self._nodes = nodes
        self._report = report
        self._timings = timings
        self._plans = plans_of(spec) if spec.traits.is_script else {}

    async def begin(self, node_ids: Collection[str]) -> None:
        """Create the folders on these nodes. Raises CodeUnavailable if a node can't create its
        folders."""
        limit_s = self._timings.code_limit_s
        asked = {
            node_id: self._nodes.ask(node_id, "begin_folders", plan, limit_s=limit_s)
            for node_id, plan in self._plans_on(node_ids).items()
        }
        for node_id, problem in zip(asked, await asyncio.gather(*asked.values()), strict=True):
            if problem is not None:
                message = f"the script's folders can't be created on node {node_id}: {problem}"
                raise CodeUnavailable(message)

    def _plans_on(self, node_ids: Collection[str]) -> dict[str, FolderPlan]:
        """Return the plans of these nodes. A node that joined the attempt later gets a new plan."""
        if not self._plans:
            return {}
        for node_id in node_ids:
            if node_id not in self._plans:
                plans = list(self._plans.values())
                # Each node reports its files under a different rank.
                rank = 1 + max(plan.rank for plan in plans)
                self._plans[node_id] = replace(plans[0], rank=rank, node_rank=len(plans))
        return {node_id: self._plans[node_id] for node_id in dict.fromkeys(node_ids)}

    async def keep(self, outcome: Outcome, are_given_up: AreGivenUp) -> Outcome:
        """Wait until the files of all nodes are stored and reported, and return the outcome. If
        files are lost, the attempt fails, and its message contains the reason."""
        if not self._plans or outcome.cause is Cause.SLOTS_UNAVAILABLE:
            return outcome
        found: list[dict[str, int] | None] = [None]
        if len(self._plans) > 1:
            asked = (self._until_answered(n, are_given_up, "output_sizes") for n in self._plans)
            found = await asyncio.gather(*asked)
        taken: set[str] = set()
        num_bytes = 0
        """Total size of the files of the previous nodes."""
        ends = []
        for node_id, sizes in zip(self._plans, found, strict=True):
            theirs = sorted(taken.intersection(sizes or ()))
            keep = "keep_output", theirs, num_bytes
            num_bytes += sum((sizes or {}).values())
            taken.update(sizes or ())
            ends.append(self._until_answered(node_id, are_given_up, *keep))
        return with_files(outcome, await asyncio.gather(*ends))

    async def _until_answered(
        self, node_id: str, are_given_up: AreGivenUp, method: str, *arguments: Any
    ) -> Any:
        """Call the agent until it returns a result. Returns None if `are_given_up` returns True for
        the node. While the agent has to wait, it returns the reason as a message; the first such
        message is reported."""
        limit_s = self._timings.files_answer_limit_s
        is_reported = False
        while True:
            try:
                answer = await self._nodes.ask(node_id, method, *arguments, limit_s=limit_s)
                if isinstance(answer, str):
                    if answer and not is_reported:
                        self._report(WaitingReport(answer))
                        is_reported = True
                elif answer is not None:
                    return answer
            except KeyError:
                return None  # the node is gone
            except Exception:  # TimeoutError or an error from Ray
                if await are_given_up({node_id}):
                    return None
            await asyncio.sleep(self._timings.ask_again_pause_s)


def plans_of(spec: AttemptSpec) -> dict[str, FolderPlan]:
    """Return the plan of each node, in rank order."""
    plans: dict[str, FolderPlan] = {}
    rank = 0
    base = f"{spec.storage_url.rstrip('/')}/{attempt_prefix(spec.job_id, spec.attempt)}"
    for part in spec.slices:
        if part.node_id not in plans:
            plans[part.node_id] = FolderPlan(
                rank=rank,
                node_rank=len(plans),
                output_url=f"{base}/output",
                folder_url=folder_url(spec.storage_url, spec.job_id),
                spool_limit_bytes=spec.spool_limit_bytes,
                limit_bytes=spec.output_limit_bytes,
                code=_digest_of(spec.code),
            )
        rank += part.num_workers
    return plans


def _digest_of(code: CodeRef | RemoteCodeRef | None) -> str:
    if code is None:
        return ""
    return code.digest if isinstance(code, RemoteCodeRef) else code.manifest_sha256


def with_files(outcome: Outcome, ends: list[FilesKept | None]) -> Outcome:
    """Return the outcome, with a note about files that were not stored. In `ends`, None stands for
    a dead node."""
    lost = ["a node that held some of the files was lost" if e is None else e.problem for e in ends]
    problems = [problem for problem in lost if problem]
    left_out = [end.left_out for end in ends if end is not None and end.left_out]
    left_out += [end.left_behind for end in ends if end is not None and end.left_behind]
    outcome = replace(outcome, left_behind=". ".join(dict.fromkeys(left_out)))
    if problems:
        note = f"not all files in the script's folders were stored: {'; '.join(problems)}"
        if outcome.cause is Cause.SUCCEEDED:
            cause = Cause.NODE_LOST if None in ends else Cause.INFRASTRUCTURE
            outcome = replace(outcome, cause=cause, message=f"every rank succeeded, but {note}")
        else:
            outcome = replace(outcome, message=f"{outcome.message}; {note}")
    return outcome
