"""Keys and values that several modules use in the data of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ACTOR = "actor"
"""Key for the name of the user who caused an event."""
ANONYMOUS = "anonymous"
"""The actor on a server without tokens."""
SYNC_PLAN = "sync_plan"
"""Key, in the data of the event `submitted`, for the plan by which `sync: auto` was resolved."""

REMARKS: Final[Mapping[str, str]] = {
    "budget": "The budget of the queue is exhausted, or is available again.",
    "changed": "A user changed fields of the job's document.",
    "changing_batch": "The group continues with a different global batch size on the same slots.",
    "checkpoints_found": "The service found committed checkpoints that no rank had reported.",
    "clients_left_out": "Clients lied in secure aggregation, and are excluded from later rounds.",
    "divergence": "The training is diverging: a monitored value is not finite.",
    "drill": "A drill is waiting for its step, has injected its fault, has passed or has failed.",
    "environment": (
        "The nodes are preparing the job's packages and code, or have finished doing so."
    ),
    "error": "A rank ended with an error. The code identifies the cause.",
    "frames_refused": "A rank sent a malformed report, which was not stored.",
    "gpu_fault": "A GPU on which the job ran has a fault, or reported an error of the program.",
    "growing": "An elastic group was given more slots.",
    "hang": "A rank hung. `dray hangs` shows the stacks.",
    "log_dropped": (
        "Part of the log was dropped, because the storage refused it and the service's own limit "
        "was reached."
    ),
    "log_limit": "The log has reached `DRAY_LOG_LIMIT_BYTES`.",
    "log_refused": (
        "The log can't be written to the storage because of a file in the job's own folder."
    ),
    "media_left_out": "Media that the job reported, such as pictures, could not be stored, or are "
    "more than a job can have. The newest media are not stored.",
    "metric_keys_limit": "The job reports too many different metrics. The newest metrics are not "
    "stored.",
    "metric_steps_repeated": "A metric was reported again for a step that already has a value.",
    "no_memory_copies": "Copies of a divided model's state do not fit in memory, so no copies are "
    "kept.",
    "node_check": "A node on which the job lost a rank was tested, before it could get work again.",
    "openai": "The server ignored an option of an OpenAI API request, or chose its value.",
    "preempting": "The job was asked to save a checkpoint and release its slots.",
    "queue": "A user held, released or moved the waiting job, or changed its priority.",
    "recall_unanswered": "The group did not release the slots that it was asked to release.",
    "regrouped": "The group is training again after it lost a rank.",
    "regrouping": "The group lost a rank while it was recovering from the loss of another rank.",
    "replicas_differ": "Replicas of the model that should be equal are different.",
    "reports_left_out": (
        "Some of the ranks' reports were dropped, because they could not be stored."
    ),
    "resized": "The group is training with a different number of workers.",
    "resumed": "The attempt resumed from a checkpoint.",
    "round_broken": "A round of secure aggregation could not be completed and is being restarted.",
    "shrinking": "The group was asked to release slots for a waiting job.",
    "silence": "One of dray's processes on the cluster is not responding, or is responding again.",
    "slot_quarantined": "A slot could not be cleaned up after the job, and is withheld from other "
    "jobs.",
    "slot_released": "A withheld slot has been cleaned up and is available again.",
    "spares": "A spare of the group has become ready, was lost, or could not be started.",
    "stragglers": "Some ranks are slower than the other ranks.",
    "waiting": "The ranks have exited, but the attempt is still waiting, for example for the "
    "storage.",
    "webhook": "A webhook was disabled, because it had not accepted a message for a day.",
}
"""Maps each type of event that doesn't change the job's state to its meaning."""
