"""/v1/reservations: shows, creates, changes and deletes reservations and maintenance windows."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters

from api.context import (
    Actor,
    Caller,
    NoParameters,
    Query,
    TheContext,
    Whose,
    refuse_unless_admin,
    use_cases,
)
from api.http import body
from api.http.caching import answer, fresh
from api.openapi import json_body
from api.problems import BODY, declare
from dray import views
from dray.reservations import ReservationChangeRequest, ReservationRequest
from dray.spec.fields import QUEUE_NAME
from service.queues.reservations import Reservations

router = APIRouter(prefix="/v1/reservations", tags=["reservations"])
TheReservations = Annotated[Reservations, use_cases(lambda runtime: Reservations(runtime.database))]
ReservationOfPath = Annotated[str, Path(max_length=63, pattern=QUEUE_NAME)]
WRONG = ("invalid_reservation", "reservation_overlaps", "forbidden")


class ReservationsQuery(Query):
    ended: bool = False
    """Also list reservations that have ended."""


@router.post(
    "",
    operation_id="create_reservation",
    status_code=201,
    response_model=views.Reservation,
    openapi_extra=json_body(ReservationRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *WRONG, "reservation_exists", "too_many_reservations"),
)
async def create(
    request: Request,
    context: TheContext,
    reservations: TheReservations,
    caller: Caller,
    actor: Actor,
) -> Response:
    """Create a reservation or a maintenance window; only for admins. The name of a reservation that
    has ended can be used again. In the response, `warnings` lists nodes that don't exist yet."""
    refuse_unless_admin(context, caller, "create reservations")
    limit_bytes = context.runtime.settings.max_body_bytes
    wanted, _document = await body.read_as(ReservationRequest, request, limit_bytes)
    found = await reservations.create(wanted, actor=actor)
    return fresh(found, 201, {"Location": f"/v1/reservations/{found.name}"})


@router.get(
    "",
    operation_id="list_reservations",
    response_model=views.ReservationPage,
    responses=declare("invalid_parameter"),
)
async def list_reservations(
    request: Request,
    reservations: TheReservations,
    user: Whose,
    query: Annotated[ReservationsQuery, QueryParameters()],
) -> Response:
    """List the reservations in the order in which they begin. Admins see all reservations and
    maintenance windows; other users see maintenance windows, reservations for themselves, and
    reservations for queues or projects."""
    return answer(request, await reservations.list(user=user, ended=query.ended))


@router.get(
    "/{name}",
    operation_id="get_reservation",
    response_model=views.Reservation,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "reservation_not_found"),
)
async def get(
    request: Request, reservations: TheReservations, user: Whose, name: ReservationOfPath
) -> Response:
    """Show a reservation, the nodes that it includes now, and its numbers of jobs."""
    return answer(request, await reservations.get(name, user=user))


@router.patch(
    "/{name}",
    operation_id="change_reservation",
    response_model=views.Reservation,
    openapi_extra=json_body(ReservationChangeRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, *WRONG, "reservation_not_found"),
)
async def change(
    request: Request,
    context: TheContext,
    reservations: TheReservations,
    caller: Caller,
    actor: Actor,
    name: ReservationOfPath,
) -> Response:
    """Change some fields of a reservation. Only admins are allowed to do this. The body is a merge
    patch (RFC 7396), sent as `application/json`: null restores a field's default."""
    refuse_unless_admin(context, caller, "change reservations")
    limit_bytes = context.runtime.settings.max_body_bytes
    changes, _document = await body.read_as(ReservationChangeRequest, request, limit_bytes)
    return fresh(await reservations.change(name, changes, actor=actor), 200)


@router.delete(
    "/{name}",
    operation_id="delete_reservation",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter", "reservation_not_found", "forbidden"),
)
async def delete(
    context: TheContext,
    reservations: TheReservations,
    caller: Caller,
    actor: Actor,
    name: ReservationOfPath,
) -> Response:
    """Delete a reservation, which ends it. Jobs that run on its nodes continue. Only admins can do
    this."""
    refuse_unless_admin(context, caller, "delete reservations")
    await reservations.delete(name, actor=actor)
    return Response(status_code=204)
