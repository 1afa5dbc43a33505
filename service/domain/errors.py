"""The errors that a caller of a use case may see, without a word of HTTP.

Each class has a stable `code` that programs match on; `message` says what was wrong, `hint` what
to do, and `pointer` (a JSON pointer) which field of the document is at fault. An error that only
one class of use cases raises may stand with that class.
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
    """No round of the scheduler of this number is kept, or it can't be read."""


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
    """As many clients are invited as the job's document has."""


class RoundOver(Conflict, code="round_over"):
    """The round of a federated job is not open (any more)."""


class UpdateRefused(Conflict, code="update_refused"):
    """The client is not asked for an update in the round, or has sent it."""


class BadUpdate(DomainError, code="bad_update"):
    """The update of a client has not the size of the model, or lacks a part."""


class JobFinished(Conflict, code="job_finished"):
    """The job has ended, so it can be neither cancelled nor changed."""


class JobLive(Conflict, code="job_live"):
    """The job has not ended, so it can't be deleted."""


class JobNotRunning(Conflict, code="job_not_running"):
    """The job does not run (any more, or yet), so that nothing can happen to its processes."""


class JobNotWaiting(Conflict, code="job_not_waiting"):
    """The job does not wait, so it can be neither held nor moved."""


class QueueFull(Conflict, code="queue_full"):
    """As many jobs wait in the queue as its rules allow."""


class QueueInUse(Conflict, code="queue_in_use"):
    """Jobs that have not ended are in the queue, or it is the default one: it can't be deleted."""


class CheckpointInUse(Conflict, code="checkpoint_in_use"):
    """A live job starts from a checkpoint of this one, so it can't be deleted."""


class AnnotationsChanged(Conflict, code="annotations_changed"):
    """Somebody changed the tags or notes since they were read."""


class TooManyWebhooks(Conflict, code="too_many_webhooks"):
    """The user has as many webhooks as a user may have."""


class WebhookDisabled(Conflict, code="webhook_disabled"):
    """The webhook is disabled, so nothing is sent to it."""


class Unsatisfiable(DomainError, code="unsatisfiable"):
    """The cluster could not run the job even if it were empty."""


class OutOfMemory(Unsatisfiable, code="out_of_memory"):
    """The job needs more memory than its workers have."""


class NotPlannable(DomainError, code="not_plannable"):
    """Nothing can be said of the job before its data are read, or it leaves no way to divide it."""


class DrillImpossible(DomainError, code="drill_impossible"):
    """The job is none on which this drill makes sense."""


class DataSourceForbidden(DomainError, code="data_source_forbidden"):
    """The job names data that the operator lets nobody read."""


class WebhookUrlForbidden(DomainError, code="webhook_url_forbidden"):
    """The operator lets no webhook be sent to this address."""


class IdempotencyMismatch(DomainError, code="idempotency_key_reused"):
    """The idempotency key was used before, for another request."""


class BadUpload(DomainError, code="bad_upload"):
    """The uploaded files can't be those of one folder."""


class UploadTooLarge(DomainError, code="upload_too_large"):
    """More was uploaded than one owner may."""


class CodeUnfit(DomainError, code="code_unfit"):
    """The job names code that is not there, or that has no such entrypoint."""


class UnknownQueue(DomainError, code="unknown_queue"):
    """The job names a queue that does not exist."""


class PriorityTooHigh(DomainError, code="priority_too_high"):
    """The job's priority is above its queue's `max_priority`."""


class InvalidQueue(DomainError, code="invalid_queue"):
    """The rules of a queue contradict each other."""


class ArrayTooLarge(DomainError, code="array_too_large"):
    """The array has more jobs than the operator allows."""


class InvalidTrial(DomainError, code="invalid_trial"):
    """The values of a trial do not go together: its document would be refused."""


class SamplerUnavailable(DomainError, code="sampler_unavailable"):
    """The sampler of the sweep is not installed on this server."""


class DependencyNotFound(DomainError, code="dependency_not_found"):
    """A job or array that the job is to start after does not exist."""


class DependencyNeverSatisfied(DomainError, code="dependency_never_satisfied"):
    """A job after whose success the job is to start has ended otherwise."""


class InitFromNotFound(DomainError, code="init_from_not_found"):
    """The checkpoint that the job is to start from does not exist."""


class InitFromDiffers(DomainError, code="init_from_differs"):
    """The checkpoint is of another model, or, taken whole, of another kind of training."""


class QuotaExceeded(DomainError, code="quota_exceeded"):
    """The storage is full by the operator's settings: no job is taken."""


class InvalidSearch(DomainError, code="invalid_search"):
    """The search expression can't be read; the message begins with the column at fault."""


class NotComparable(DomainError, code="not_comparable"):
    """There is nothing to compare the jobs with, or the baseline is no job of the experiment."""


class TooManyTags(DomainError, code="too_many_tags"):
    """The job would have more tags than a job can have."""


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"):
    """The first request with this idempotency key has not been answered yet."""


class BadCursor(DomainError, code="bad_cursor"):
    """The cursor is not one that this call gave out."""


class Unavailable(DomainError, code="unavailable"):
    """Something the service stands on does not answer; asking again later may work."""


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...


class FolderSpoilt(StorageUnavailable):
    """The storage works, and something is in the way in the folder of one job: a file where a
    folder is to be, a link that leads out of it, missing permissions."""
