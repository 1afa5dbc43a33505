"""The errors that a caller of a use case may see, without a word of HTTP.

Each class has a stable `code` that programs match on; `message` says what was wrong, `hint` what
to do, and `pointer` (a JSON pointer) which field of the document is at fault.
"""

from __future__ import annotations

from typing import ClassVar


class DomainError(Exception):
    """Base of all errors that a caller of a use case may see."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, pointer: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.pointer = pointer
        self.hint = hint


class NotFound(DomainError):
    """There is no such job."""

    code = "job_not_found"


class ArtifactNotFound(NotFound):
    """The job exists, the artifact does not."""

    code = "artifact_not_found"


class CheckpointNotFound(NotFound):
    """The job exists, the checkpoint or its file does not."""

    code = "checkpoint_not_found"


class DrillNotFound(NotFound):
    """The job exists, the drill does not."""

    code = "drill_not_found"


class CodeNotFound(NotFound):
    """The caller has uploaded no such code, or the job has none."""

    code = "code_not_found"


class QueueNotFound(NotFound):
    """There is no queue of this name."""

    code = "queue_not_found"


class DecisionNotFound(NotFound):
    """No round of the scheduler of this number is kept, or it can't be read."""

    code = "decision_not_found"


class ArrayNotFound(NotFound):
    """There is no array of this id, or none of its jobs is left."""

    code = "array_not_found"


class SweepNotFound(NotFound):
    """There is no sweep of this id, or none of its trials is left."""

    code = "sweep_not_found"


class ExperimentNotFound(NotFound):
    """No job has this experiment."""

    code = "experiment_not_found"


class WebhookNotFound(NotFound):
    """There is no webhook of this id, or it is another user's."""

    code = "webhook_not_found"


class DownloadLinkNotFound(NotFound):
    """The link has been used, is too old, or never was."""

    code = "download_link_not_found"


class ClientNotFound(NotFound):
    """The federated job has no client of this number."""

    code = "client_not_found"


class JoinTokenUnknown(DomainError):
    """The token is not one of the job's clients, or was revoked."""

    code = "unauthorized"


class Conflict(DomainError):
    """The job's state does not allow what was asked."""

    code = "conflict"


class NotFederated(Conflict):
    """The job has no clients outside of the cluster."""

    code = "not_federated"


class TooManyClients(Conflict):
    """As many clients are invited as the job's document has."""

    code = "too_many_clients"


class RoundOver(Conflict):
    """The round of a federated job is not open (any more)."""

    code = "round_over"


class UpdateRefused(Conflict):
    """The client is not asked for an update in the round, or has sent it."""

    code = "update_refused"


class BadUpdate(DomainError):
    """The update of a client has not the size of the model, or lacks a part."""

    code = "bad_update"


class JobFinished(Conflict):
    """The job has ended, so it can be neither cancelled nor changed."""

    code = "job_finished"


class JobLive(Conflict):
    """The job has not ended, so it can't be deleted."""

    code = "job_live"


class JobNotRunning(Conflict):
    """The job does not run (any more, or yet), so that nothing can happen to its processes."""

    code = "job_not_running"


class JobNotWaiting(Conflict):
    """The job does not wait, so it can be neither held nor moved."""

    code = "job_not_waiting"


class QueueFull(Conflict):
    """As many jobs wait in the queue as its rules allow."""

    code = "queue_full"


class QueueInUse(Conflict):
    """Jobs that have not ended are in the queue, or it is the default one: it can't be deleted."""

    code = "queue_in_use"


class CheckpointInUse(Conflict):
    """A live job starts from a checkpoint of this one, so it can't be deleted."""

    code = "checkpoint_in_use"


class AnnotationsChanged(Conflict):
    """Somebody changed the tags or notes since they were read."""

    code = "annotations_changed"


class TooManyWebhooks(Conflict):
    """The user has as many webhooks as a user may have."""

    code = "too_many_webhooks"


class WebhookDisabled(Conflict):
    """The webhook is disabled, so nothing is sent to it."""

    code = "webhook_disabled"


class Unsatisfiable(DomainError):
    """The cluster could not run the job even if it were empty."""

    code = "unsatisfiable"


class OutOfMemory(Unsatisfiable):
    """The job needs more memory than its workers have."""

    code = "out_of_memory"


class NotPlannable(DomainError):
    """Nothing can be said of the job before its data are read, or it leaves no way to divide it."""

    code = "not_plannable"


class DrillImpossible(DomainError):
    """The job is none on which this drill makes sense."""

    code = "drill_impossible"


class DataSourceForbidden(DomainError):
    """The job names data that the operator lets nobody read."""

    code = "data_source_forbidden"


class WebhookUrlForbidden(DomainError):
    """The operator lets no webhook be sent to this address."""

    code = "webhook_url_forbidden"


class IdempotencyMismatch(DomainError):
    """The idempotency key was used before, for another request."""

    code = "idempotency_key_reused"


class BadUpload(DomainError):
    """The uploaded files can't be those of one folder."""

    code = "bad_upload"


class UploadTooLarge(DomainError):
    """More was uploaded than one owner may."""

    code = "upload_too_large"


class CodeUnfit(DomainError):
    """The job names code that is not there, or that has no such entrypoint."""

    code = "code_unfit"


class UnknownQueue(DomainError):
    """The job names a queue that does not exist."""

    code = "unknown_queue"


class PriorityTooHigh(DomainError):
    """The job's priority is above its queue's `max_priority`."""

    code = "priority_too_high"


class InvalidQueue(DomainError):
    """The rules of a queue contradict each other."""

    code = "invalid_queue"


class ArrayTooLarge(DomainError):
    """The array has more jobs than the operator allows."""

    code = "array_too_large"


class InvalidTrial(DomainError):
    """The values of a trial do not go together: its document would be refused."""

    code = "invalid_trial"


class SamplerUnavailable(DomainError):
    """The sampler of the sweep is not installed on this server."""

    code = "sampler_unavailable"


class DependencyNotFound(DomainError):
    """A job or array that the job is to start after does not exist."""

    code = "dependency_not_found"


class DependencyNeverSatisfied(DomainError):
    """A job after whose success the job is to start has ended otherwise."""

    code = "dependency_never_satisfied"


class InitFromNotFound(DomainError):
    """The checkpoint that the job is to start from does not exist."""

    code = "init_from_not_found"


class InitFromDiffers(DomainError):
    """The checkpoint is of another model, or, taken whole, of another kind of training."""

    code = "init_from_differs"


class QuotaExceeded(DomainError):
    """The storage is full by the operator's settings: no job is taken."""

    code = "quota_exceeded"


class InvalidSearch(DomainError):
    """The search expression can't be read; the message begins with the column at fault."""

    code = "invalid_search"


class NotComparable(DomainError):
    """There is nothing to compare the jobs with, or the baseline is no job of the experiment."""

    code = "not_comparable"


class TooManyTags(DomainError):
    """The job would have more tags than a job can have."""

    code = "too_many_tags"


class IdempotencyInFlight(Conflict):
    """The first request with this idempotency key has not been answered yet."""

    code = "idempotency_in_flight"


class BadCursor(DomainError):
    """The cursor is not one that this call gave out."""

    code = "bad_cursor"


class Unavailable(DomainError):
    """Something the service stands on does not answer; asking again later may work."""

    code = "unavailable"


class DatabaseUnavailable(Unavailable):
    code = "database_unavailable"


class StorageUnavailable(Unavailable):
    code = "storage_unavailable"


class FolderSpoilt(StorageUnavailable):
    """The storage works, and something is in the way in the folder of one job: a file where a
    folder is to be, a link that leads out of it, missing permissions."""
