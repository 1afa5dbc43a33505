"""/v1/schedules: jobs that are submitted at the times of a cron expression."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from fastapi import Query as QueryParameters

from api.context import NoParameters, PageQuery, TheCaller, TheContext, use_cases
from api.http import body
from api.http.caching import answer, fresh
from api.http.concurrency import TOO_MANY
from api.http.idempotency import PROBLEMS as IDEMPOTENCY_PROBLEMS
from api.http.idempotency import KeyHeader, check_key
from api.http.waiting import limited
from api.openapi import json_body
from api.problems import BODY, SUBMISSION, declare
from dray import views
from dray.schedule_requests import ScheduleChangeRequest, ScheduleRequest
from service.schedules.service import Schedules

router = APIRouter(prefix="/v1/schedules", tags=["schedules"])
TheSchedules = Annotated[
    Schedules,
    use_cases(lambda runtime: Schedules(runtime.database, runtime.jobs, runtime.settings)),
]

ONE = ("invalid_parameter", "schedule_not_found")


@router.post(
    "",
    operation_id="create_schedule",
    status_code=201,
    response_model=views.JobSchedule,
    openapi_extra=json_body(ScheduleRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *SUBMISSION, "schedule_exists", "too_many_schedules"),
)
async def create(
    request: Request, context: TheContext, schedules: TheSchedules, caller: TheCaller
) -> Response:
    """Create a schedule, whose jobs are yours. The document is checked as in a submission. Each run
    is checked again when it is submitted, with the rules and limits of that time."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ScheduleRequest, request, limit_bytes)
    schedule = await schedules.create(wanted, owner=caller.name)
    return fresh(schedule, 201, {"Location": f"/v1/schedules/{schedule.id}"})


@router.get(
    "",
    operation_id="list_schedules",
    response_model=views.SchedulePage,
    responses=declare("invalid_parameter", "bad_cursor", TOO_MANY),
)
async def list_schedules(
    request: Request,
    schedules: TheSchedules,
    caller: TheCaller,
    query: Annotated[PageQuery, QueryParameters()],
) -> Response:
    """List your schedules, the oldest first. Admins see the schedules of all users."""
    async with limited(request):
        page = await schedules.list(caller, limit=query.limit, cursor=query.cursor)
    return answer(request, page)


@router.get(
    "/{schedule_id}",
    operation_id="get_schedule",
    response_model=views.JobSchedule,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def get(
    request: Request, schedules: TheSchedules, caller: TheCaller, schedule_id: str
) -> Response:
    """Show a schedule and its last run. As in all calls, `schedule_id` is the id of a schedule, or
    the name of one of your schedules."""
    return answer(request, await schedules.get(schedule_id, caller))


@router.get(
    "/{schedule_id}/runs",
    operation_id="list_schedule_runs",
    response_model=views.ScheduleRunPage,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def runs(
    request: Request, schedules: TheSchedules, caller: TheCaller, schedule_id: str
) -> Response:
    """List the latest 100 runs, the latest first, including runs that were skipped, missed or
    refused. To list all of a schedule's jobs, use `GET /v1/jobs?schedule=ID`."""
    return answer(request, await schedules.runs(schedule_id, caller))


@router.patch(
    "/{schedule_id}",
    operation_id="change_schedule",
    response_model=views.JobSchedule,
    openapi_extra=json_body(ScheduleChangeRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *SUBMISSION, "schedule_not_found"),
)
async def change(
    request: Request,
    context: TheContext,
    schedules: TheSchedules,
    caller: TheCaller,
    schedule_id: str,
) -> Response:
    """Change, pause or resume a schedule. A change applies from the next run on. When a schedule is
    resumed, `missed` decides what happens to the runs whose times passed during the pause."""
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ScheduleChangeRequest, request, limit_bytes)
    return fresh(await schedules.change(schedule_id, wanted, caller), 200)


@router.post(
    "/{schedule_id}/run",
    operation_id="run_schedule",
    status_code=201,
    response_model=views.Job,
    dependencies=[NoParameters],
    responses=declare(*ONE, *SUBMISSION, *IDEMPOTENCY_PROBLEMS, "run_unfinished"),
)
async def run(
    context: TheContext,
    schedules: TheSchedules,
    caller: TheCaller,
    schedule_id: str,
    idempotency_key: KeyHeader = None,
) -> Response:
    """Submit a job of the schedule now, as its owner, even if the schedule is paused. The times of
    the schedule are not affected."""
    job = await schedules.run_now(
        schedule_id,
        caller,
        actor=context.authority.actor(caller.name),
        idempotency=check_key(idempotency_key),
    )
    return fresh(job, 201, {"Location": f"/v1/jobs/{job.id}"})


@router.delete(
    "/{schedule_id}",
    operation_id="delete_schedule",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*ONE),
)
async def delete(schedules: TheSchedules, caller: TheCaller, schedule_id: str) -> Response:
    """Delete a schedule and the record of its runs. Its jobs remain."""
    await schedules.delete(schedule_id, caller)
    return Response(status_code=204)
