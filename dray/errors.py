"""Exceptions of the SDK, named after the API's problem codes::

    DrayError
      + SpecError               a document can't be read or is not a valid job; nothing was sent
      + IntegrityError          a download has a wrong hash, or its path would leave `dest`
      + AmbiguousJob            several jobs match a name or the beginning of an id
      + JobFailed               a job that was followed ended without success
      + WaitTimeout             `wait` timed out; the job goes on (also a TimeoutError)
      + ArrayWaitTimeout        `wait_array` timed out; the jobs go on (also a TimeoutError)
      + TransportError          the server did not answer (also a ConnectionError)
      |   + ServerUnreachable   no server listens at the address, or the name is unknown
      |   + RequestTimeout      the server took too long (also a TimeoutError)
      + ApiError                the server answered with a problem (RFC 9457)
          + BadRequest          the request or the document is wrong; `pointer` names the field
          + Unauthorized        the token is missing or wrong
          + Forbidden           the server does not allow the call
          + NotFound            the resource does not exist
          + Conflict            the state of the resource does not allow the request
          + ServerError         the server failed
              + Unavailable     the server can't answer now; try again

Each problem code of the API is a subclass of one of these classes, and has its HTTP status: this
module is the only table of codes.

An unknown code is raised as the class of its HTTP status, so `except NotFound` also catches the
codes of a newer server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # the help of the command line does not need them
    from dray.views import Job, JobArray, Problem


class DrayError(Exception):
    """Base of all exceptions that dray raises on purpose."""


class SpecError(DrayError, ValueError):
    """A job document can't be read or is not a valid job. Nothing was sent."""

    def __init__(
        self,
        detail: str,
        *,
        source: str | None = None,
        pointer: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.source = source
        """The file that the document was read from."""
        self.pointer = pointer
        """JSON pointer to the field at fault, as in the server's answer."""
        self.hint = hint

    def __str__(self) -> str:
        parts = [part for part in (self.source, self.pointer, self.detail) if part]
        return ": ".join(parts) + (f" ({self.hint})" if self.hint else "")


class IntegrityError(DrayError):
    """A download does not match its hash, or its path would leave the destination."""


class WaitTimeout(DrayError, TimeoutError):
    """`wait` timed out before the job reached the state. The job goes on."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        super().__init__(f"job {job.id} is still {job.state} after {round(timeout_s, 1):g} s")
        self.job = job


class ArrayWaitTimeout(DrayError, TimeoutError):
    """`wait_array` timed out before all jobs of the array were over. The jobs go on."""

    def __init__(self, array: JobArray, timeout_s: float) -> None:
        super().__init__(f"array {array.id} is still {array.state} after {round(timeout_s, 1):g} s")
        self.array = array


class JobFailed(DrayError):
    """A job that was followed failed or was cancelled."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.id} is {job.state}: {job.reason.message}")
        self.job = job


class AmbiguousJob(DrayError, LookupError):
    """Several jobs match a name or the beginning of an id. No job was changed."""

    def __init__(
        self, detail: str, reference: str, candidates: Mapping[str, Job], *, more: bool
    ) -> None:
        super().__init__(detail)
        self.reference = reference
        self.candidates = list(candidates.values())
        """The jobs that match, newest first."""
        self.ids = list(candidates)
        """The id of each candidate, or of the array that the candidate represents."""
        self.more = more
        """Whether more jobs match than the candidates."""


class TransportError(DrayError, ConnectionError):
    """The server did not answer."""


class ServerUnreachable(TransportError):
    """No server answers at the address."""


class RequestTimeout(TransportError, TimeoutError):
    """The server took longer than the client's `timeout`."""


CODES: dict[str, type[ApiError]] = {}
"""Problem code -> exception class."""


class ApiError(DrayError):
    """The server answered with a problem."""

    code: ClassVar[str] = ""
    http_status: ClassVar[int] = 0
    """The HTTP status of answers with this code."""

    def __init_subclass__(cls, *, code: str = "", status: int = 0) -> None:
        cls.code = code or cls.code
        cls.http_status = status or cls.http_status
        if code:
            CODES[code] = cls

    def __init__(self, problem: Problem, *, retry_after_s: float | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.retry_after_s = retry_after_s
        self.status = problem.status
        self.detail = problem.detail
        self.request_id = problem.request_id
        """Id of the request in the server's log."""
        self.pointer = problem.pointer
        """JSON pointer to the field at fault."""
        self.hint = problem.hint
        """Suggested remedy, if the server knows one."""

    def __str__(self) -> str:
        where = f"{self.pointer}: " if self.pointer else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.detail}{hint}"


class BadRequest(ApiError, status=422):
    """The request, or the document in it, is wrong; sending it again won't help."""


class Malformed(BadRequest, code="malformed_request", status=400): ...


class Unprocessable(BadRequest, code="invalid_document"): ...


class InvalidParameter(BadRequest, code="invalid_parameter"): ...


class BadIdempotencyKey(BadRequest, code="bad_idempotency_key", status=400): ...


class BadCursor(BadRequest, code="bad_cursor", status=400): ...


class UnsupportedMediaType(BadRequest, code="unsupported_media_type", status=415): ...


class BodyTooLarge(BadRequest, code="body_too_large", status=413): ...


class HeadersTooLarge(BadRequest, code="headers_too_large", status=431): ...


class RequestTooSlow(BadRequest, code="request_too_slow", status=408):
    """The request did not arrive completely in time. The clients send it again."""


class TooManyRequests(BadRequest, code="too_many_requests", status=429):
    """The caller has too many requests of this kind at once. The clients send the request again."""


class RangeNotSatisfiable(BadRequest, code="range_not_satisfiable", status=416):
    """The file has no byte in the requested range."""


class Unsatisfiable(BadRequest, code="unsatisfiable"):
    """The job requests more resources than the cluster could ever have."""


class OutOfMemory(Unsatisfiable, code="out_of_memory"):
    """The job needs more memory than its workers have; the hint has a remedy."""


class NotPlannable(BadRequest, code="not_plannable"):
    """The plan depends on unread data, or the job can't be divided in any way."""


class BadUpload(BadRequest, code="bad_upload"):
    """The uploaded files can't be in one folder, or were damaged during the upload."""


class BadUpdate(BadRequest, code="bad_update"):
    """The update does not have the size of the model, or lacks a part."""


class UploadTooLarge(BadRequest, code="upload_too_large", status=413):
    """The code is larger than the server accepts."""


class CodeUnfit(BadRequest, code="code_unfit"):
    """The job names code that was not uploaded, or a program that is not in the code or can't
    run."""


class UnknownQueue(BadRequest, code="unknown_queue"):
    """The job names a queue that does not exist; the detail lists the existing queues."""


class PriorityTooHigh(BadRequest, code="priority_too_high"):
    """The job's priority is above its queue's `max_priority`."""


class InvalidQueue(BadRequest, code="invalid_queue"):
    """The rules of a queue contradict each other; `pointer` names the rule at fault."""


class ArrayTooLarge(BadRequest, code="array_too_large"):
    """`array.size`, or the number of a sweep's trials, is above the server's limit."""


class InvalidTrial(BadRequest, code="invalid_trial"):
    """Values of a sweep's parameters conflict; the detail names the trial."""


class SamplerUnavailable(BadRequest, code="sampler_unavailable"):
    """The sampler of the sweep is not installed on the server."""


class DependencyNotFound(BadRequest, code="dependency_not_found"):
    """`after` names a job or array that does not exist."""


class DependencyNeverSatisfied(BadRequest, code="dependency_never_satisfied"):
    """`after` requires the success of a job that has failed or was cancelled."""


class InitFromNotFound(BadRequest, code="init_from_not_found"):
    """`init_from` names a job or a step that has no checkpoint to start from."""


class InitFromDiffers(BadRequest, code="init_from_differs"):
    """`init_from` names a job with another model or, with `take: everything`, a job that trained
    differently; `pointer` names the field that differs."""


class DrillImpossible(BadRequest, code="drill_impossible"):
    """The job does not allow the drill; `pointer` names the field of the drill at fault."""


class IdempotencyMismatch(BadRequest, code="idempotency_key_reused"):
    """The idempotency key was used for another request."""


class InvalidSearch(BadRequest, code="invalid_search"):
    """The search expression is invalid; the message begins with the column of the error."""


class NotComparable(BadRequest, code="not_comparable"):
    """There is no job to compare with, or the baseline is not a job of the experiment."""


class TooManyTags(BadRequest, code="too_many_tags"):
    """The job would have more tags than a job can have."""


class MethodNotAllowed(BadRequest, code="method_not_allowed", status=405): ...


class Unauthorized(ApiError, code="unauthorized", status=401): ...


class Forbidden(ApiError, code="forbidden", status=403):
    """The server does not allow the call, such as one from a foreign web page."""


class DataSourceForbidden(Forbidden, code="data_source_forbidden"):
    """The server's settings don't allow jobs to read this data source."""


class WebhookUrlForbidden(Forbidden, code="webhook_url_forbidden"):
    """The server's settings don't allow webhooks to be sent to this address."""


class NotFound(ApiError, status=404):
    """The resource does not exist."""


class JobNotFound(NotFound, code="job_not_found"): ...


class ArtifactNotFound(NotFound, code="artifact_not_found"): ...


class CheckpointNotFound(NotFound, code="checkpoint_not_found"):
    """The job has no such checkpoint, or the checkpoint has no such file."""


class DrillNotFound(NotFound, code="drill_not_found"):
    """The job has no such drill."""


class CodeNotFound(NotFound, code="code_not_found"):
    """You have uploaded no such code, or the job has none."""


class QueueNotFound(NotFound, code="queue_not_found"):
    """There is no queue of this name."""


class DecisionNotFound(NotFound, code="decision_not_found"):
    """The scheduler has no round with this number, or does not keep it any more."""


class ArrayNotFound(NotFound, code="array_not_found"):
    """There is no such array, or all its jobs were deleted."""


class SweepNotFound(NotFound, code="sweep_not_found"):
    """There is no such sweep, or all its trials were deleted."""


class ExperimentNotFound(NotFound, code="experiment_not_found"):
    """No job has this experiment."""


class WebhookNotFound(NotFound, code="webhook_not_found"):
    """There is no such webhook, or it belongs to another user."""


class DownloadLinkNotFound(NotFound, code="download_link_not_found"):
    """The link has been used, is too old, or its token is no longer valid."""


class ClientNotFound(NotFound, code="client_not_found"):
    """The federated job has no client with this number."""


class RouteNotFound(NotFound, code="not_found"):
    """The server has no such path: it may be older than the client, or not a dray server."""


class Conflict(ApiError, code="conflict", status=409):
    """The state of the resource does not allow the request."""


class JobLive(Conflict, code="job_live"):
    """Only a finished job can be deleted."""


class JobFinished(Conflict, code="job_finished"):
    """A job that has ended can be neither cancelled nor changed."""


class JobNotRunning(Conflict, code="job_not_running"):
    """The job is not running, so it can be neither preempted nor drilled."""


class JobNotWaiting(Conflict, code="job_not_waiting"):
    """The job is not waiting, so it can be neither held nor moved."""


# Not 429, which is for rates that a pause resolves: the clients would send the request again.
class QueueFull(Conflict, code="queue_full"):
    """The queue has as many waiting jobs as its rules allow."""


class QueueInUse(Conflict, code="queue_in_use"):
    """The queue can't be deleted: it has jobs that have not ended, or is the default queue."""


class CheckpointInUse(Conflict, code="checkpoint_in_use"):
    """The job can't be deleted: a job that has not ended starts from one of its checkpoints."""


class AnnotationsChanged(Conflict, code="annotations_changed", status=412):
    """The tags or notes were changed since they were read: read them again."""


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"):
    """A submit with this key is in progress. The clients send the request again."""


class TooManyWebhooks(Conflict, code="too_many_webhooks"):
    """You have as many webhooks as a user may have."""


class WebhookDisabled(Conflict, code="webhook_disabled"):
    """The webhook is disabled, so nothing is sent to it."""


class NotFederated(Conflict, code="not_federated"):
    """The job has no clients outside of the cluster."""


class TooManyClients(Conflict, code="too_many_clients"):
    """All clients of the job's document have been invited."""


class RoundOver(Conflict, code="round_over"):
    """The round is not open, or not any more: ask for the newest round."""


class UpdateRefused(Conflict, code="update_refused"):
    """The client does not take part in the round, or has sent its update."""


class ServerError(ApiError, status=500):
    """The server failed to answer; its log has the reason."""


class InternalError(ServerError, code="internal_error"): ...


class QuotaExceeded(ServerError, code="quota_exceeded", status=507):
    """The server's storage is full: running jobs go on, and no new job is accepted."""


class Unavailable(ServerError, code="unavailable", status=503):
    """The server can't answer now; try again."""


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...
