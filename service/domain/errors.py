"""The errors that a caller of a use case may see. They do not depend on HTTP.

Each class has a stable `code` for programs. `message` states the error, `hint` what to do, and
`pointer` (a JSON pointer) the invalid field of the document. An error that only one class of use
cases raises may stand with that class.
"""

from __future__ import annotations

from typing import ClassVar


class DomainError(Exception):
    """Base of all errors that a caller of a use case may see."""

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
    """The job exists, the artifact does not."""


class CheckpointNotFound(NotFound, code="checkpoint_not_found"):
    """The job exists, the checkpoint or its file does not."""


class DrillNotFound(NotFound, code="drill_not_found"):
    """The job exists, the drill does not."""


class CodeNotFound(NotFound, code="code_not_found"):
    """The caller has uploaded no such code, or the job has none."""


class QueueNotFound(NotFound, code="queue_not_found"):
    """There is no queue of this name."""


class DecisionNotFound(NotFound, code="decision_not_found"):
    """The scheduler's round with this number is not stored or can't be read."""


class ArrayNotFound(NotFound, code="array_not_found"):
    """There is no array of this id, or none of its jobs is left."""


class SweepNotFound(NotFound, code="sweep_not_found"):
    """There is no sweep of this id, or none of its trials is left."""


class ExperimentNotFound(NotFound, code="experiment_not_found"):
    """No job has this experiment."""


class WebhookNotFound(NotFound, code="webhook_not_found"):
    """There is no webhook of this id, or it is another user's."""


class DownloadLinkNotFound(NotFound, code="download_link_not_found"):
    """The link has been used, is too old, or never was."""


class ClientNotFound(NotFound, code="client_not_found"):
    """The federated job has no client of this number."""


class JoinTokenUnknown(DomainError, code="unauthorized"):
    """The token is not one of the job's clients, or was revoked."""


class Conflict(DomainError, code="conflict"):
    """The job's state does not allow what was asked."""


class NotFederated(Conflict, code="not_federated"):
    """The job has no clients outside of the cluster."""


class TooManyClients(Conflict, code="too_many_clients"):
    """All clients of the job's document are already invited."""


class RoundOver(Conflict, code="round_over"):
    """The round of a federated job is not open, or not any more."""


class UpdateRefused(Conflict, code="update_refused"):
    """The client is not asked for an update in the round, or has already sent it."""


class BadUpdate(DomainError, code="bad_update"):
    """A client's update does not have the size of the model, or a part is missing."""


class JobFinished(Conflict, code="job_finished"):
    """The job has ended, so it can be neither cancelled nor changed."""


class JobLive(Conflict, code="job_live"):
    """The job has not ended, so it can't be deleted."""


class JobNotRunning(Conflict, code="job_not_running"):
    """The job does not run yet, or not any more, so it has no processes to act on."""


class JobNotWaiting(Conflict, code="job_not_waiting"):
    """The job does not wait, so it can be neither held nor moved."""


class QueueFull(Conflict, code="queue_full"):
    """The queue has the most waiting jobs that its rules allow."""


class QueueInUse(Conflict, code="queue_in_use"):
    """The queue can't be deleted: it has unfinished jobs, or is the default queue."""


class CheckpointInUse(Conflict, code="checkpoint_in_use"):
    """A live job starts from a checkpoint of this one, so it can't be deleted."""


class AnnotationsChanged(Conflict, code="annotations_changed"):
    """The tags or notes have changed since they were read."""


class TooManyWebhooks(Conflict, code="too_many_webhooks"):
    """The user already has the maximum number of webhooks."""


class WebhookDisabled(Conflict, code="webhook_disabled"):
    """The webhook is disabled, so nothing is sent to it."""


class Unsatisfiable(DomainError, code="unsatisfiable"):
    """The cluster could not run the job even if it were empty."""


class OutOfMemory(Unsatisfiable, code="out_of_memory"):
    """The job needs more memory than its workers have."""


class NotPlannable(DomainError, code="not_plannable"):
    """The job can't be planned before its data are read, or its model can't be divided."""


class DrillImpossible(DomainError, code="drill_impossible"):
    """The drill makes no sense for this job."""


class DataSourceForbidden(DomainError, code="data_source_forbidden"):
    """The operator does not allow jobs to read these data."""


class WebhookUrlForbidden(DomainError, code="webhook_url_forbidden"):
    """The operator does not allow webhooks to this address."""


class IdempotencyMismatch(DomainError, code="idempotency_key_reused"):
    """The idempotency key was used before, for another request."""


class BadUpload(DomainError, code="bad_upload"):
    """The uploaded files can't form one folder."""


class UploadTooLarge(DomainError, code="upload_too_large"):
    """The upload exceeds the owner's limit."""


class CodeUnfit(DomainError, code="code_unfit"):
    """The job's code does not exist, or does not have the entrypoint."""


class UnknownQueue(DomainError, code="unknown_queue"):
    """The job names a queue that does not exist."""


class PriorityTooHigh(DomainError, code="priority_too_high"):
    """The job's priority is above its queue's `max_priority`."""


class InvalidQueue(DomainError, code="invalid_queue"):
    """The rules of a queue contradict each other."""


class ArrayTooLarge(DomainError, code="array_too_large"):
    """The array has more jobs than the operator allows."""


class InvalidTrial(DomainError, code="invalid_trial"):
    """The values of a trial are not valid together: its document would be refused."""


class SamplerUnavailable(DomainError, code="sampler_unavailable"):
    """The sampler of the sweep is not installed on this server."""


class DependencyNotFound(DomainError, code="dependency_not_found"):
    """A job or array that this job depends on does not exist."""


class DependencyNeverSatisfied(DomainError, code="dependency_never_satisfied"):
    """A job whose success this job depends on did not succeed."""


class InitFromNotFound(DomainError, code="init_from_not_found"):
    """The checkpoint that the job is to start from does not exist."""


class InitFromDiffers(DomainError, code="init_from_differs"):
    """The checkpoint has another model or, to continue its training, another kind of training."""


class QuotaExceeded(DomainError, code="quota_exceeded"):
    """The storage has reached the operator's limit, so no job is accepted."""


class InvalidSearch(DomainError, code="invalid_search"):
    """The search expression is not valid. The message begins with the column of the error."""


class NotComparable(DomainError, code="not_comparable"):
    """The jobs have no baseline, or the baseline is not a job of the experiment."""


class TooManyTags(DomainError, code="too_many_tags"):
    """The job would have more tags than allowed."""


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"):
    """The first request with this idempotency key has not been answered yet."""


class BadCursor(DomainError, code="bad_cursor"):
    """The cursor was not returned by this call."""


class Unavailable(DomainError, code="unavailable"):
    """A system that the service depends on does not answer. A later retry may succeed."""


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...


class FolderSpoilt(StorageUnavailable):
    """The storage works, but a job's folder is unusable: a file is in place of a folder, a link
    leads out of it, or permissions are missing."""
