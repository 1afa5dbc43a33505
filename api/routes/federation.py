"""Routes for clients outside of the cluster. The owner of a job invites clients with
/v1/jobs/{id}/clients. The invited clients use /v1/federated/{id}, with their own tokens, to take
part in the job's rounds."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi import Path as PathParameter
from fastapi import Query as QueryParameters
from pydantic import Field

from api.context import Actor, NoParameters, Query, TheContext, use_cases
from api.http import body
from api.http.caching import answer, fresh
from api.http.concurrency import TOO_MANY, ConcurrencyLimits
from api.http.downloads import BINARY, DOWNLOAD, StoredFile, download
from api.http.waiting import MAX_WAIT_S, long_poll
from api.openapi import json_body
from api.problems import BODY, Refused, declare
from api.security.auth import client_token
from dray import views
from dray.requests import UpdateRequest
from dray.secure_aggregation.messages import MAX_MESSAGE_BYTES
from dray.spec.fields import Document, Int
from service.db.notifications import events_of, rounds_of
from service.federation.client_rounds import ClientRounds, RoundFile
from service.federation.invitations import Invitations

router = APIRouter(prefix="/v1", tags=["federated"])
TheInvitations = Annotated[Invitations, use_cases(lambda runtime: Invitations(runtime.database))]

UPLOADS = ConcurrencyLimits(at_once=32, of_caller=1, waiting_of_caller=1)
"""Limits on the number of update parts that are received at the same time. Together, these parts
use up to 128 MiB of memory."""
SMALL_BYTES = 16 << 10
_JOB = ("invalid_parameter", "job_not_found", "not_federated")
_ROUND = ("invalid_parameter", "malformed_request", "round_over")
_FILE = {**DOWNLOAD, **declare(*_ROUND, "range_not_satisfiable", "storage_unavailable")}
_BYTES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            BINARY: {"schema": {"type": "string", "format": "binary"}, "example": "(bytes)"}
        },
    }
}
Number = Annotated[int, PathParameter(ge=0, le=2**31)]
RoundName = Annotated[str, PathParameter(max_length=64)]
Phase = Annotated[str, PathParameter(max_length=32)]


async def _rounds(request: Request, context: TheContext, job_id: str) -> ClientRounds:
    """Return the operations of a client. The operations use the caller's token. Each operation
    checks that the token belongs to a client of the job."""
    if "\0" in request.url.path or "%00" in str(request.url.query):
        raise Refused("malformed_request", "the URL contains a NUL character")
    request.state.caller = "a client of a federated job"
    runtime = context.runtime
    return ClientRounds(runtime.database, runtime.storage, job_id, client_token(request))


Rounds = Annotated[ClientRounds, Depends(_rounds)]


# Routes for the owner of a job.


MAX_INVITED = 1000
"""Maximum number of clients in one call. A call is one transaction, and SQLite allows only one
writer at a time."""


class InvitationRequest(Document):
    """Invite clients outside of the cluster to a federated job."""

    clients: Annotated[Int, Field(ge=1, le=MAX_INVITED)] = 1
    """Number of clients to invite. To invite more than the maximum, send several requests."""


@router.post(
    "/jobs/{job_id}/clients",
    operation_id="invite_clients",
    status_code=201,
    response_model=views.InvitationPage,
    openapi_extra=json_body(InvitationRequest),
    dependencies=[NoParameters],
    responses=declare(*BODY, "job_not_found", "not_federated", "job_finished", "too_many_clients"),
)
async def invite(
    request: Request, invitations: TheInvitations, actor: Actor, job_id: str
) -> Response:
    """Invite clients outside of the cluster. The response contains their tokens, which are shown
    only once. A token is valid only for the rounds of this job."""
    wanted, _document = await body.read_as(InvitationRequest, request, SMALL_BYTES)
    return fresh(await invitations.invite(job_id, wanted.clients, by=actor), 201)


@router.get(
    "/jobs/{job_id}/clients",
    operation_id="list_clients",
    response_model=views.FederatedClientPage,
    dependencies=[NoParameters],
    responses=declare(*_JOB),
)
async def list_clients(
    request: Request, invitations: TheInvitations, _: Actor, job_id: str
) -> Response:
    """List the invited clients, and show the job's latest round."""
    return answer(request, await invitations.clients(job_id))


@router.delete(
    "/jobs/{job_id}/clients/{client}",
    operation_id="revoke_client",
    status_code=204,
    response_class=Response,
    dependencies=[NoParameters],
    responses=declare(*_JOB, "client_not_found"),
)
async def revoke(
    request: Request, invitations: TheInvitations, _: Actor, job_id: str, client: Number
) -> Response:
    """Revoke the token of a client. The server then refuses the token, but keeps the updates that
    the client has sent. You can invite another client instead."""
    await invitations.revoke(job_id, client)
    return Response(status_code=204)


# Routes for clients.


class RoundQuery(Query):
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0
    """Maximum number of seconds to wait until the client has something to do, or the job has
    ended."""


@router.get(
    "/federated/{job_id}/round",
    operation_id="get_round",
    response_model=views.FederatedRound,
    responses=declare("invalid_parameter", "malformed_request"),
)
async def get_round(
    request: Request,
    context: TheContext,
    rounds: Rounds,
    job_id: str,
    query: Annotated[RoundQuery, QueryParameters()],
) -> Response:
    """Show the latest round, and whether the calling client should send an update. Like all calls
    under `/v1/federated`, this call requires a client's token."""
    found = await long_poll(
        *(context, request, (rounds_of(job_id), events_of(job_id)), query.wait_s),
        rounds.look,
        lambda view: view.phase is not views.RoundPhase.WAITING,
        is_of_client=True,
    )
    return answer(request, found)


@router.get(
    "/federated/{job_id}/form",
    operation_id="get_form",
    response_class=Response,
    dependencies=[NoParameters],
    responses=_FILE,
)
async def get_form(request: Request, context: TheContext, rounds: Rounds) -> Response:
    """Return the information that clients need about the model and its training: columns, classes,
    and the relevant fields of the job document. The location of the job's own data is not
    included."""
    return _download(request, context, await rounds.form())


@router.get(
    "/federated/{job_id}/rounds/{round_name}/model",
    operation_id="get_round_model",
    response_class=Response,
    dependencies=[NoParameters],
    responses=_FILE,
)
async def get_model(
    request: Request, context: TheContext, rounds: Rounds, round_name: RoundName
) -> Response:
    """Download the weights with which clients start the open round, as safetensors."""
    return _download(request, context, await rounds.model(round_name))


@router.put(
    "/federated/{job_id}/rounds/{round_name}/parts/{part}",
    operation_id="put_update_part",
    status_code=204,
    response_class=Response,
    openapi_extra=_BYTES,
    dependencies=[NoParameters],
    responses=declare(
        *(*_ROUND, "update_refused", "bad_update", "body_too_large", "unsupported_media_type"),
        *(TOO_MANY, "quota_exceeded", "storage_unavailable"),
    ),
)
async def put_part(
    request: Request, context: TheContext, rounds: Rounds, round_name: RoundName, part: Number
) -> Response:
    """Send a part of an update. An update is a sequence of little-endian float32 numbers, which is
    split into parts of `part_bytes` bytes; the last part can be shorter. Any part can be sent again
    before the update is sent."""
    size = await rounds.size_of_part(round_name, part)
    async with context.uploads.acquire(rounds.digest):
        content, _kind = await body.read_bytes(request, size, [BINARY])
        await rounds.put_part(round_name, part, content)
    return Response(status_code=204)


@router.post(
    "/federated/{job_id}/rounds/{round_name}/update",
    operation_id="send_update",
    status_code=201,
    response_model=views.UpdateReceipt,
    openapi_extra=json_body(UpdateRequest),
    dependencies=[NoParameters],
    responses={
        200: {"model": views.UpdateReceipt, "description": "The update had already been sent."},
        **declare(*BODY, "round_over", "update_refused", "bad_update", "storage_unavailable"),
    },
)
async def send_update(request: Request, rounds: Rounds, round_name: RoundName) -> Response:
    """Send an update whose parts have all been uploaded. If a client sends several updates in a
    round, only the first counts."""
    await rounds.look()  # checks the token before the body is read
    update, _document = await body.read_as(UpdateRequest, request, SMALL_BYTES)
    receipt, is_new = await rounds.send(round_name, update)
    return fresh(receipt, 201 if is_new else 200)


@router.get(
    "/federated/{job_id}/rounds/{round_name}/messages/{phase}",
    operation_id="get_masking_message",
    response_class=Response,
    dependencies=[NoParameters],
    responses={200: DOWNLOAD[200], **declare(*_ROUND, "update_refused", "storage_unavailable")},
)
async def get_message(rounds: Rounds, round_name: RoundName, phase: Phase) -> Response:
    """Download the message to which the client responds in this phase of secure aggregation."""
    content = await rounds.message(round_name, phase)
    return Response(content, media_type=BINARY, headers={"Cache-Control": "no-store"})


@router.put(
    "/federated/{job_id}/rounds/{round_name}/answers/{phase}",
    operation_id="put_masking_answer",
    status_code=201,
    response_model=views.UpdateReceipt,
    openapi_extra=_BYTES,
    dependencies=[NoParameters],
    responses={
        200: {"model": views.UpdateReceipt, "description": "The message had already been sent."},
        **declare(*_ROUND, "update_refused", "bad_update", "body_too_large"),
        **declare("unsupported_media_type", TOO_MANY, "storage_unavailable"),
    },
)
async def put_answer(
    request: Request, context: TheContext, rounds: Rounds, round_name: RoundName, phase: Phase
) -> Response:
    """Send the client's response in a phase of secure aggregation. In the phase `masked_input`,
    first upload the parts of the update, and then send their SHA-256 as the answer."""
    await rounds.look()  # checks the token before the body
    async with context.uploads.acquire(rounds.digest):
        content, _kind = await body.read_bytes(request, MAX_MESSAGE_BYTES, [BINARY])
        receipt, is_new = await rounds.answer(round_name, phase, content)
    return fresh(receipt, 201 if is_new else 200)


def _download(request: Request, context: TheContext, file: RoundFile) -> Response:
    stored = StoredFile(file.key, file.size_bytes, file.sha256, file.key.rpartition("/")[2])
    return download(request, context.runtime.storage, stored)
