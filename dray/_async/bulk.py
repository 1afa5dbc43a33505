"""Apply an action to many jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from dray import views
from dray._async.calls import Calls
from dray._http.transport import Call, params, present
from dray.filters import States, label_texts, states_of

BULK_S = 600.0
"""Maximum number of seconds to wait for an action on many jobs, in addition to the client's
timeout."""


class BulkCalls(Calls):
    async def bulk(
        self,
        action: str,
        *,
        state: States | None = None,
        queue: str | None = None,
        label: Mapping[str, str] | None = None,
        owner: str | None = None,
        project: str | None = None,
        name: str | None = None,
        name_glob: str | None = None,
        text: str | None = None,
        array: str | None = None,
        array_index: int | None = None,
        schedule: str | None = None,
        reservation: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        where: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        dry_run: bool = False,
        max_jobs: int | None = None,
    ) -> views.BulkChange:
        """Apply an action to all of your jobs that match the arguments, which mean the same as in
        `jobs`.

        action: `cancel`, `delete`, `hold`, `release`, `move` (with the parameters `queue` or
        `first`), `priority` (with `priority`), `preempt` (with `grace_s`) or `tag` (with `add_tags`
        or `remove_tags`). owner: change the jobs of this user instead of yours. dry_run: only
        report what would happen. max_jobs: raise NotConfirmed, and change nothing, if more jobs
        match; required if the arguments other than `state` and `owner` exclude no job. Jobs that
        can't be changed don't stop the action; the result counts them, with the reasons.
        """
        times = {"created_after": created_after, "created_before": created_before}
        chosen = present(
            state=[str(one) for one in states_of(state)] or None,
            queue=queue,
            label=list(label_texts(label)) or None,
            owner=owner,
            project=project,
            name=name,
            name_glob=name_glob,
            text=text,
            array=array,
            array_index=array_index,
            schedule=schedule,
            reservation=reservation,
            where=where,
            **dict(params(**times)),
        )
        body = present(
            action=action, filter=chosen, parameters=parameters, dry_run=dry_run, max=max_jobs
        )
        call = Call.with_json("POST", "/v1/jobs/bulk", body)
        return await self._read(views.BulkChange, replace(call, wait_s=BULK_S))
