"""The errors that use cases raise, independent of HTTP.

Each class has a stable `code` for programs; `dray.errors` documents the codes. `message` describes
the error, `hint` suggests what to do, and `pointer` is the JSON pointer of the invalid field. An
error that only one use case raises can be defined next to that use case.
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


class NotFound(DomainError, code="job_not_found"): ...


class ArtifactNotFound(NotFound, code="artifact_not_found"): ...


class CheckpointNotFound(NotFound, code="checkpoint_not_found"): ...


class DrillNotFound(NotFound, code="drill_not_found"): ...


class CodeNotFound(NotFound, code="code_not_found"): ...


class FileNotFound(NotFound, code="file_not_found"): ...


class ModelNotFound(NotFound, code="model_not_found"): ...


class ModelVersionNotFound(NotFound, code="model_version_not_found"): ...


class QueueNotFound(NotFound, code="queue_not_found"): ...


class ReservationNotFound(NotFound, code="reservation_not_found"): ...


class NodeNotFound(NotFound, code="node_not_found"): ...


class NothingWithheld(NotFound, code="nothing_withheld"): ...


class DecisionNotFound(NotFound, code="decision_not_found"): ...


class ArrayNotFound(NotFound, code="array_not_found"): ...


class SweepNotFound(NotFound, code="sweep_not_found"): ...


class ExperimentNotFound(NotFound, code="experiment_not_found"): ...


class WebhookNotFound(NotFound, code="webhook_not_found"): ...


class ScheduleNotFound(NotFound, code="schedule_not_found"): ...


class DownloadLinkNotFound(NotFound, code="download_link_not_found"): ...


class ClientNotFound(NotFound, code="client_not_found"): ...


class JoinTokenUnknown(DomainError, code="unauthorized"):
    """The token does not belong to any client of this job, or has been revoked."""


class Conflict(DomainError, code="conflict"): ...


class NotFederated(Conflict, code="not_federated"): ...


class TooManyClients(Conflict, code="too_many_clients"): ...


class RoundOver(Conflict, code="round_over"): ...


class UpdateRefused(Conflict, code="update_refused"): ...


class BadUpdate(DomainError, code="bad_update"): ...


class JobFinished(Conflict, code="job_finished"): ...


class JobLive(Conflict, code="job_live"): ...


class JobNotRunning(Conflict, code="job_not_running"): ...


class JobNotWaiting(Conflict, code="job_not_waiting"): ...


class QueueFull(Conflict, code="queue_full"): ...


class QueueInUse(Conflict, code="queue_in_use"): ...


class CheckpointInUse(Conflict, code="checkpoint_in_use"): ...


class AliasMoved(Conflict, code="alias_moved"): ...


class VersionInUse(Conflict, code="version_in_use"): ...


class NotConfirmed(Conflict, code="not_confirmed"): ...


class AnnotationsChanged(Conflict, code="annotations_changed"): ...


class ExperimentChanged(Conflict, code="experiment_changed"): ...


class TooManyWebhooks(Conflict, code="too_many_webhooks"): ...


class TooManySchedules(Conflict, code="too_many_schedules"): ...


class ScheduleExists(Conflict, code="schedule_exists"): ...


class RunUnfinished(Conflict, code="run_unfinished"): ...


class WebhookDisabled(Conflict, code="webhook_disabled"): ...


class Unsatisfiable(DomainError, code="unsatisfiable"): ...


class OutOfMemory(Unsatisfiable, code="out_of_memory"): ...


class NotPlannable(DomainError, code="not_plannable"): ...


class DrillImpossible(DomainError, code="drill_impossible"): ...


class DataSourceForbidden(DomainError, code="data_source_forbidden"): ...


class WebhookUrlForbidden(DomainError, code="webhook_url_forbidden"): ...


class IdempotencyMismatch(DomainError, code="idempotency_key_reused"): ...


class BadUpload(DomainError, code="bad_upload"): ...


class UploadTooLarge(DomainError, code="upload_too_large"): ...


class CodeUnfit(DomainError, code="code_unfit"): ...


class UnknownQueue(DomainError, code="unknown_queue"): ...


class QueueHoldsNoJobs(DomainError, code="queue_holds_no_jobs"): ...


class PriorityTooHigh(DomainError, code="priority_too_high"): ...


class InvalidDocument(DomainError, code="invalid_document"): ...


class LimitRaised(DomainError, code="forbidden"): ...


class ModelOfAnother(DomainError, code="forbidden"): ...


class OwnerUnknown(DomainError, code="forbidden"):
    """The owner of a schedule no longer has a token."""

    def __init__(self, owner: str) -> None:
        super().__init__(
            f"{owner} no longer has a token", hint="add the token, or delete the schedule"
        )


class FunctionsRefused(DomainError, code="forbidden"): ...


class RuntimeTooLong(DomainError, code="runtime_too_long"): ...


class InvalidQueue(DomainError, code="invalid_queue"): ...


class ArrayTooLarge(DomainError, code="array_too_large"): ...


class InvalidTrial(DomainError, code="invalid_trial"): ...


class SamplerUnavailable(DomainError, code="sampler_unavailable"): ...


class DependencyNotFound(DomainError, code="dependency_not_found"): ...


class DependencyNeverSatisfied(DomainError, code="dependency_never_satisfied"): ...


class DependencyCircular(DependencyNeverSatisfied):
    """The job would wait for itself."""


class LicenceNotAccepted(DomainError, code="licence_not_accepted"): ...


class InitFromNotFound(DomainError, code="init_from_not_found"): ...


class InitFromDiffers(DomainError, code="init_from_differs"): ...


class QuotaExceeded(DomainError, code="quota_exceeded"): ...


class InvalidSearch(DomainError, code="invalid_search"): ...


class NotComparable(DomainError, code="not_comparable"): ...


class TooManyTags(DomainError, code="too_many_tags"): ...


class IdempotencyInFlight(Conflict, code="idempotency_in_flight"): ...


class InvalidParameter(DomainError, code="invalid_parameter"): ...


class BadCursor(DomainError, code="bad_cursor"): ...


class Unavailable(DomainError, code="unavailable"): ...


class DatabaseUnavailable(Unavailable, code="database_unavailable"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable"): ...


class FolderSpoilt(StorageUnavailable):
    """The storage works, but the folder of a job is unusable: it contains a file where a folder
    should be, or a link that leads outside, or permissions are missing."""
