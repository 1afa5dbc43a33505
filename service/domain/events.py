"""Names in the data of jobs' events that several modules write or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ACTOR = "actor"
"""Key of the name of the user who caused an event."""
ANONYMOUS = "anonymous"
"""The actor on a server without tokens."""
SYNC_PLAN = "sync_plan"
"""Key of the choice of `sync: auto` in the event `submitted`."""

REMARKS: Final[Mapping[str, str]] = {
    "budget": "The budget of the queue is used up, or has free money again.",
    "changing_batch": "The group goes on with another global batch on the slots that it has.",
    "checkpoints_found": "The service found committed checkpoints that no rank had reported.",
    "clients_left_out": "Clients of a federated job lied and take part in no more rounds.",
    "divergence": "The training diverges: a watched metric is not finite.",
    "drill": "A drill waits for its step, injected its fault, passed or failed.",
    "environment": "The nodes prepare the packages and the code of the job, or have them ready.",
    "error": "A rank ended with an error; the code names its cause.",
    "frames_refused": "A report of a rank is malformed and was not stored.",
    "growing": "An elastic group was given more slots.",
    "hang": "A rank hung. `dray hangs` shows the stacks.",
    "log_dropped": "Part of the log was dropped, because the storage refused it for too long.",
    "log_limit": "The log reached `DRAY_LOG_LIMIT_BYTES`.",
    "log_refused": "The storage refuses the log because of a file in the job's own folder.",
    "metric_keys_limit": "The job reports too many different metrics; the newest are not stored.",
    "metric_steps_repeated": "A metric was reported again for a step that has a value.",
    "preempting": "The job was asked to save a checkpoint and to leave its slots.",
    "queue": "A user held, released or moved the waiting job, or changed its priority.",
    "recall_unanswered": "The group did not release the slots that it was asked for.",
    "regrouped": "The group trains again after it lost a rank.",
    "regrouping": "The group lost a rank while it recovers from the loss of another one.",
    "reports_left_out": "A reply was stored without the reports of the ranks.",
    "resized": "The group trains with another number of workers.",
    "resumed": "The attempt resumed from a checkpoint.",
    "round_broken": "A round of secure aggregation could not end and begins anew.",
    "shrinking": "The group was asked to release slots for a waiting job.",
    "silence": "A process of dray on the cluster does not answer, or answers again.",
    "slot_quarantined": "A slot is not clean after the job and is withheld from others.",
    "slot_released": "A slot that was withheld is clean again.",
    "stragglers": "Some ranks are slower than the others.",
    "waiting": "The end of the attempt waits, for example for the storage.",
    "webhook": "A webhook accepted no message for a day and is disabled.",
}
"""The types of events that leave the job's state as it is, each with its meaning."""
