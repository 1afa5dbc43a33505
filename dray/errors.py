"""Exceptions of the SDK, named after the API's problem codes::

    DrayError
      + SpecError               a document is unreadable or not a valid job; nothing was sent
      + IntegrityError          a download has a wrong hash, or its path would leave `dest`
      + AmbiguousJob            several jobs match a name or the beginning of an id
      + JobFailed               a job that was being followed failed or was cancelled
      + WaitTimeout             `wait` timed out; the job continues (also a TimeoutError)
      + ArrayWaitTimeout        `wait_array` timed out; the jobs continue (also a TimeoutError)
      + TransportError          the server did not respond (also a ConnectionError)
      |   + ServerUnreachable   no server listens at the address, or the name is unknown
      |   + RequestTimeout      the server took too long (also a TimeoutError)
      + ApiError                the server responded with an error (RFC 9457)
          + BadRequest          the request or the document is invalid; `pointer` names the field
          + Unauthorized        the token is missing or wrong
          + Forbidden           the server does not allow the call
          + NotFound            the resource does not exist
          + Conflict            the state of the resource does not allow the request
          + ServerError         the server failed
              + Unavailable     the server is temporarily unavailable; try again later

Each problem code of the API has its own subclass of one of these classes, with its HTTP status;
this module is the only table of codes.

For an unknown code, the class that corresponds to the HTTP status is raised, so `except NotFound`
also catches codes that only a newer server has.
"""

from __future__ import annotations

from dray.api_error import CODES as CODES
from dray.api_error import ApiError as ApiError
from dray.client_errors import AmbiguousJob as AmbiguousJob
from dray.client_errors import ArrayWaitTimeout as ArrayWaitTimeout
from dray.client_errors import DrayError as DrayError
from dray.client_errors import IntegrityError as IntegrityError
from dray.client_errors import JobFailed as JobFailed
from dray.client_errors import RequestTimeout as RequestTimeout
from dray.client_errors import ServerUnreachable as ServerUnreachable
from dray.client_errors import SpecError as SpecError
from dray.client_errors import TransportError as TransportError
from dray.client_errors import WaitTimeout as WaitTimeout


class BadRequest(ApiError, status=422):
    """The request, or the document in it, is invalid. The request would fail again if it were
    repeated."""


class Malformed(BadRequest, code="malformed_request", status=400): ...


class Unprocessable(BadRequest, code="invalid_document"): ...


class InvalidParameter(BadRequest, code="invalid_parameter"): ...


class BadIdempotencyKey(BadRequest, code="bad_idempotency_key", status=400): ...


class BadCursor(BadRequest, code="bad_cursor", status=400): ...


class UnsupportedMediaType(BadRequest, code="unsupported_media_type", status=415): ...


class BodyTooLarge(BadRequest, code="body_too_large", status=413): ...


class HeadersTooLarge(BadRequest, code="headers_too_large", status=431): ...


class RequestTooSlow(BadRequest, code="request_too_slow", status=408):
    """The request did not arrive completely in time. dray's clients retry it automatically."""


class TooManyRequests(BadRequest, code="too_many_requests", status=429):
    """The caller has too many concurrent requests of this kind. dray's clients retry
    automatically."""


class RangeNotSatisfiable(BadRequest, code="range_not_satisfiable", status=416):
    """The requested range is outside of the file."""


class Unsatisfiable(BadRequest, code="unsatisfiable"):
    """The job requests more resources than the cluster could ever have."""


class OutOfMemory(Unsatisfiable, code="out_of_memory"):
    """The job needs more memory than its workers have; the hint suggests a fix."""


class NotPlannable(BadRequest, code="not_plannable"):
    """The plan depends on data that was not read, or there is no way to parallelize the job."""


class BadUpload(BadRequest, code="bad_upload"):
    """The paths of the uploaded files conflict, or a file was damaged during the upload."""


class BadUpdate(BadRequest, code="bad_update"):
    """The size of the update does not match the model, or a part is missing."""


class UploadTooLarge(BadRequest, code="upload_too_large", status=413):
    """The code is larger than the server accepts."""


class CodeUnfit(BadRequest, code="code_unfit"):
    """The job names code that was not uploaded, or a program that can't be run or is not part of
    the code."""


class UnknownQueue(BadRequest, code="unknown_queue"):
    """The job's queue does not exist; the detail lists the existing queues."""


class QueueHoldsNoJobs(BadRequest, code="queue_holds_no_jobs"):
    """The job's queue is the parent of other queues; the hint lists these."""


class PriorityTooHigh(BadRequest, code="priority_too_high"):
    """The job's priority is above its queue's `max_priority`."""


class RuntimeTooLong(BadRequest, code="runtime_too_long"):
    """The job's `max_runtime_s` is above its queue's `max_runtime_s`."""


class ReservationUnfit(BadRequest, code="reservation_unfit"):
    """The reservation that the job names does not exist, has ended, is not for the job's user,
    queue or project, or does not fit the job's begin time or deadline."""


class InvalidReservation(BadRequest, code="invalid_reservation"):
    """The fields of a reservation contradict each other; `pointer` names the invalid field."""


class InvalidQueue(BadRequest, code="invalid_queue"):
    """The rules of a queue contradict each other; `pointer` names the invalid rule."""


class ArrayTooLarge(BadRequest, code="array_too_large"):
    """`array.size`, or the number of trials of a sweep, exceeds the server's limit."""


class InvalidTrial(BadRequest, code="invalid_trial"):
    """The parameter values of one of the sweep's trials conflict; the detail names the trial."""


class SamplerUnavailable(BadRequest, code="sampler_unavailable"):
    """The sampler of the sweep is not installed on the server."""


class DependencyNotFound(BadRequest, code="dependency_not_found"):
    """`after` names a job or array that does not exist."""


class DependencyNeverSatisfied(BadRequest, code="dependency_never_satisfied"):
    """`after` requires a job to end with a different outcome than it did, or requires the job to
    wait for itself."""


class LicenceNotAccepted(BadRequest, code="licence_not_accepted"):
    """The model in the catalogue has a licence that the job document must accept."""


class InitFromNotFound(BadRequest, code="init_from_not_found"):
    """`init_from` names a job or a step without a checkpoint to start from."""


class InitFromDiffers(BadRequest, code="init_from_differs"):
    """`init_from` names a job with a different model or, with `take: everything`, a job that
    trained differently; `pointer` names the field that differs."""


class DrillImpossible(BadRequest, code="drill_impossible"):
    """The drill is impossible for this job; `pointer` names the invalid field of the drill."""


class IdempotencyMismatch(BadRequest, code="idempotency_key_reused"):
    """The idempotency key was already used for a different request."""


class InvalidSearch(BadRequest, code="invalid_search"):
    """The search expression is invalid; the message starts with the column of the error."""


class NotComparable(BadRequest, code="not_comparable"):
    """There are no jobs to compare, or a job is not part of the experiment."""


class TooManyTags(BadRequest, code="too_many_tags"):
    """The change would exceed the maximum number of tags per job."""


class MethodNotAllowed(BadRequest, code="method_not_allowed", status=405): ...


class Unauthorized(ApiError, code="unauthorized", status=401): ...


class Forbidden(ApiError, code="forbidden", status=403):
    """The server does not allow the call, for example a call from another site's web page."""


class DataSourceForbidden(Forbidden, code="data_source_forbidden"):
    """The server's settings do not allow jobs to read this data source."""


class WebhookUrlForbidden(Forbidden, code="webhook_url_forbidden"):
    """The server's settings do not allow webhooks to this address."""


class NotFound(ApiError, status=404):
    """The resource does not exist."""


class JobNotFound(NotFound, code="job_not_found"): ...


class ArtifactNotFound(NotFound, code="artifact_not_found"): ...


class CheckpointNotFound(NotFound, code="checkpoint_not_found"):
    """The checkpoint, or the file in it, does not exist."""


class DrillNotFound(NotFound, code="drill_not_found"):
    """The job has no drill with this id."""


class CodeNotFound(NotFound, code="code_not_found"):
    """You have not uploaded code with this id, or the job has no code."""


class FileNotFound(NotFound, code="file_not_found"):
    """There is no uploaded file with this id, or it belongs to another user."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The catalogue or the registry has no model with this name."""


class ModelVersionNotFound(NotFound, code="model_version_not_found"):
    """The model has no version with this number, or no such alias."""


class QueueNotFound(NotFound, code="queue_not_found"):
    """There is no queue with this name."""


class ReservationNotFound(NotFound, code="reservation_not_found"):
    """There is no reservation with this name, or it doesn't concern you."""


class ViewNotFound(NotFound, code="view_not_found"):
    """The user has no saved view with this name."""


class ReportNotFound(NotFound, code="report_not_found"):
    """There is no report with this id."""


class NodeNotFound(NotFound, code="node_not_found"):
    """There is no node with this name in the cluster."""


class NothingWithheld(NotFound, code="nothing_withheld"):
    """There is no node with this name whose slots are withheld."""


class DecisionNotFound(NotFound, code="decision_not_found"):
    """The scheduler has no round with this number, or the round's record was deleted."""


class ArrayNotFound(NotFound, code="array_not_found"):
    """The array does not exist, or all its jobs were deleted."""


class SweepNotFound(NotFound, code="sweep_not_found"):
    """The sweep does not exist, or all its trials were deleted."""


class ExperimentNotFound(NotFound, code="experiment_not_found"):
    """No job belongs to this experiment."""


class WebhookNotFound(NotFound, code="webhook_not_found"):
    """The webhook does not exist, or it belongs to another user."""


class ScheduleNotFound(NotFound, code="schedule_not_found"):
    """The schedule does not exist, or it belongs to another user."""


class DownloadLinkNotFound(NotFound, code="download_link_not_found"):
    """The link was already used or has expired, or the token that created it is no longer valid."""


class ClientNotFound(NotFound, code="client_not_found"):
    """The federated job has no client with this number."""


class RouteNotFound(NotFound, code="not_found"):
    """The server does not have this path. The server might be older than the client, or might not
    be a dray server."""


class Conflict(ApiError, code="conflict", status=409):
    """The state of the resource does not allow the request."""


class JobLive(Conflict, code="job_live"):
    """The job has not ended, so it can't be deleted."""


class JobFinished(Conflict, code="job_finished"):
    """The job has ended, so it can be neither cancelled nor changed."""


class JobNotRunning(Conflict, code="job_not_running"):
    """The job is not running, so it can't be preempted, and no drill can be started."""


class JobNotWaiting(Conflict, code="job_not_waiting"):
    """The job is not waiting, or has already started once, which rules out the change."""


# The status is not 429, because clients retry soon after a 429, and a full queue is unlikely to
# have space then.
class QueueFull(Conflict, code="queue_full"):
    """The queue already has the maximum number of waiting jobs."""


class ReservationExists(Conflict, code="reservation_exists"):
    """A reservation with this name exists and has not ended."""


class ReservationOverlaps(Conflict, code="reservation_overlaps"):
    """Another reservation includes some of the same nodes at the same time."""


class TooManyReservations(Conflict, code="too_many_reservations"):
    """The server already stores the maximum number of reservations."""


class TooManyViews(Conflict, code="too_many_views"):
    """The user already has the maximum number of saved views."""


class TooManyReports(Conflict, code="too_many_reports"):
    """The user already has the maximum number of reports."""


class QueueInUse(Conflict, code="queue_in_use"):
    """The queue can't be deleted, because it has unfinished jobs or children, or is the default
    queue."""


class CheckpointInUse(Conflict, code="checkpoint_in_use"):
    """The job can't be deleted, because an unfinished job starts from one of its checkpoints, or
    because its result or a checkpoint is a version of a registered model."""


class AliasMoved(Conflict, code="alias_moved"):
    """The alias does not refer to the version in `from_version`, so it was not moved."""


class VersionInUse(Conflict, code="version_in_use"):
    """The version can't be deleted, because an alias refers to it."""


class NotConfirmed(Conflict, code="not_confirmed"):
    """More than `max` jobs match, or the filter matches all jobs and `max` is missing."""


class AnnotationsChanged(Conflict, code="annotations_changed", status=412):
    """The tags or notes have changed since they were last read. Read the current tags and notes."""


class ExperimentChanged(Conflict, code="experiment_changed", status=412):
    """The experiment has changed since it was read. Read it again, then apply your change."""


class ReportChanged(Conflict, code="report_changed", status=412):
    """The report has a newer version than the change was made for. Read the report again."""


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"):
    """A submission with this key is in progress. dray's clients retry automatically."""


class TooManyWebhooks(Conflict, code="too_many_webhooks"):
    """You already have the maximum number of webhooks per user."""


class TooManySchedules(Conflict, code="too_many_schedules"):
    """You already have the maximum number of schedules per user."""


class ScheduleExists(Conflict, code="schedule_exists"):
    """You already have a schedule of this name."""


class RunUnfinished(Conflict, code="run_unfinished"):
    """A previous run of the schedule has not ended, and the schedule's runs must not overlap."""


class WebhookDisabled(Conflict, code="webhook_disabled"):
    """The webhook is disabled, so nothing is sent to it."""


class NotFederated(Conflict, code="not_federated"):
    """The job has no clients outside the cluster."""


class TooManyClients(Conflict, code="too_many_clients"):
    """All clients specified in the job document have already been invited."""


class RoundOver(Conflict, code="round_over"):
    """The round is not open yet, or is no longer open. Request the latest round."""


class UpdateRefused(Conflict, code="update_refused"):
    """The client is not part of the round, or has already sent its update."""


class ServerError(ApiError, status=500):
    """The server failed to process the request. The server's log contains the reason."""


class InternalError(ServerError, code="internal_error"): ...


class QuotaExceeded(ServerError, code="quota_exceeded", status=507):
    """The server's storage is full. Running jobs continue, but no new jobs are accepted."""


class Unavailable(ServerError, code="unavailable", status=503):
    """The server is temporarily unavailable; try again later."""


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...
