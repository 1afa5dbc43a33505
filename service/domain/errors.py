"""The errors that use cases raise. They don't depend on HTTP.

Each class has a stable `code` for programs. `message` describes the error, `hint` suggests what to
do, and `pointer` is the JSON pointer of the invalid field. An error that only one use case raises
can be defined next to it.
"""

from __future__ import annotations

from typing import ClassVar


class DomainError(Exception):
    """Base class of all errors that use cases raise."""

    code: ClassVar[str] = "error"

    def __init_subclass__(cls, *, code: str = "") -> None:
        if code:
            cls.code = code

    def __init__(self, message: str, *, pointer: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.pointer = pointer
        self.hint = hint


class NotFound(DomainError, code="job_not_found"):
    """There is no such job."""


class ArtifactNotFound(NotFound, code="artifact_not_found"):
    """The job exists, but the artifact does not."""


class CheckpointNotFound(NotFound, code="checkpoint_not_found"):
    """The job exists, but the checkpoint or its file does not."""


class DrillNotFound(NotFound, code="drill_not_found"):
    """The job exists, but the drill does not."""


class CodeNotFound(NotFound, code="code_not_found"):
    """The caller has not uploaded this code, or the job has no uploaded code."""


class QueueNotFound(NotFound, code="queue_not_found"):
    """There is no queue with this name."""


class DecisionNotFound(NotFound, code="decision_not_found"):
    """The scheduling round with this number is not stored or can't be read."""


class ArrayNotFound(NotFound, code="array_not_found"):
    """There is no array with this id, or all its jobs have been deleted."""


class SweepNotFound(NotFound, code="sweep_not_found"):
    """There is no sweep with this id, or all its trials have been deleted."""


class ExperimentNotFound(NotFound, code="experiment_not_found"):
    """No job belongs to this experiment."""


class WebhookNotFound(NotFound, code="webhook_not_found"):
    """There is no webhook with this id, or it belongs to another user."""


class DownloadLinkNotFound(NotFound, code="download_link_not_found"):
    """The link has already been used, has expired, or never existed."""


class ClientNotFound(NotFound, code="client_not_found"):
    """The federated job has no client with this number."""


class JoinTokenUnknown(DomainError, code="unauthorized"):
    """The token does not belong to a client of this job, or has been revoked."""


class Conflict(DomainError, code="conflict"):
    """The request conflicts with the state of the job."""


class NotFederated(Conflict, code="not_federated"):
    """The job has no clients outside the cluster."""


class TooManyClients(Conflict, code="too_many_clients"):
    """All clients of the job document have already been invited."""


class RoundOver(Conflict, code="round_over"):
    """The round of the federated job is not open, or is no longer open."""


class UpdateRefused(Conflict, code="update_refused"):
    """The client was not asked for an update in this round, or has already sent it."""


class BadUpdate(DomainError, code="bad_update"):
    """A client's update has the wrong size, or a part of it is missing."""


class JobFinished(Conflict, code="job_finished"):
    """The job has ended, so it can't be cancelled or changed."""


class JobLive(Conflict, code="job_live"):
    """The job has not ended, so it can't be deleted."""


class JobNotRunning(Conflict, code="job_not_running"):
    """The job is not running yet, or is no longer running."""


class JobNotWaiting(Conflict, code="job_not_waiting"):
    """The job is not waiting, so it can't be held or moved."""


class QueueFull(Conflict, code="queue_full"):
    """The queue has reached its limit of waiting jobs."""


class QueueInUse(Conflict, code="queue_in_use"):
    """The queue can't be deleted, because it has unfinished jobs or is the default queue."""


class CheckpointInUse(Conflict, code="checkpoint_in_use"):
    """The job can't be deleted, because an unfinished job starts from one of its checkpoints."""


class AnnotationsChanged(Conflict, code="annotations_changed"):
    """The tags or notes have changed since they were read."""


class TooManyWebhooks(Conflict, code="too_many_webhooks"):
    """The user already has the maximum number of webhooks."""


class WebhookDisabled(Conflict, code="webhook_disabled"):
    """The webhook is disabled, so no messages are sent to it."""


class Unsatisfiable(DomainError, code="unsatisfiable"):
    """The cluster could not run the job even if it were empty."""


class OutOfMemory(Unsatisfiable, code="out_of_memory"):
    """The job needs more memory than its workers have."""


class NotPlannable(DomainError, code="not_plannable"):
    """The job can't be planned before its data is read, or its model can't be divided."""


class DrillImpossible(DomainError, code="drill_impossible"):
    """The drill is not possible for this job."""


class DataSourceForbidden(DomainError, code="data_source_forbidden"):
    """The operator does not allow jobs to read this data."""


class WebhookUrlForbidden(DomainError, code="webhook_url_forbidden"):
    """The operator does not allow webhooks with this URL."""


class IdempotencyMismatch(DomainError, code="idempotency_key_reused"):
    """The idempotency key has already been used for a different request."""


class BadUpload(DomainError, code="bad_upload"):
    """The uploaded files can't exist together in one folder."""


class UploadTooLarge(DomainError, code="upload_too_large"):
    """The upload exceeds the user's limit."""


class CodeUnfit(DomainError, code="code_unfit"):
    """The job's code does not exist, or does not contain the entrypoint."""


class UnknownQueue(DomainError, code="unknown_queue"):
    """The job names a queue that does not exist."""


class PriorityTooHigh(DomainError, code="priority_too_high"):
    """The priority of the job exceeds its queue's `max_priority`."""


class InvalidQueue(DomainError, code="invalid_queue"):
    """The rules of a queue contradict each other."""


class ArrayTooLarge(DomainError, code="array_too_large"):
    """The array has more jobs than the operator allows."""


class InvalidTrial(DomainError, code="invalid_trial"):
    """The combination of values is invalid: the document of the trial would be rejected."""


class SamplerUnavailable(DomainError, code="sampler_unavailable"):
    """The sweep's sampler is not installed on this server."""


class DependencyNotFound(DomainError, code="dependency_not_found"):
    """A job or array that this job depends on does not exist."""


class DependencyNeverSatisfied(DomainError, code="dependency_never_satisfied"):
    """A job whose success this job depends on did not succeed."""


class InitFromNotFound(DomainError, code="init_from_not_found"):
    """The checkpoint from which the job should start does not exist."""


class InitFromDiffers(DomainError, code="init_from_differs"):
    """The checkpoint belongs to a different model or, if its training should be continued, to a
    different kind of training."""


class QuotaExceeded(DomainError, code="quota_exceeded"):
    """The storage has reached the operator's limit, so no jobs are accepted."""


class InvalidSearch(DomainError, code="invalid_search"):
    """The search expression is invalid. The message begins with the column of the error."""


class NotComparable(DomainError, code="not_comparable"):
    """The jobs have no baseline, or the baseline is not a job of the experiment."""


class TooManyTags(DomainError, code="too_many_tags"):
    """The job would exceed the maximum number of tags."""


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"):
    """The first request with this idempotency key is still in progress."""


class BadCursor(DomainError, code="bad_cursor"):
    """The cursor does not come from this call."""


class Unavailable(DomainError, code="unavailable"):
    """A system that the service depends on is not responding. A later retry might succeed."""


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...


class FolderSpoilt(StorageUnavailable):
    """The storage works, but the folder of a job is unusable: it contains a file where a folder
    should be or a link that leads outside, or permissions are missing."""
