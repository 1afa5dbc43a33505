"""An example of every problem, for the description of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.examples.parts import ARRAY_ID, JOB_ID, OTHER_ID, WEBHOOK_ID
from api.problems import title
from dray.errors import CODES

_UNIQUE = "use a new key for each request, and the same key only to repeat a request"
PROBLEMS: Mapping[str, Mapping[str, str]] = {
    "malformed_request": {"detail": "the body is JSON, but not an object"},
    "bad_idempotency_key": {
        "detail": "the Idempotency-Key has 300 characters, but must consist of 1 to 255 printable "
        "ASCII characters",
        "hint": "use a random UUID, for example",
    },
    "bad_cursor": {
        "detail": "the cursor does not belong to this listing",
        "hint": "pass next_cursor of the previous page unchanged, or omit the cursor",
    },
    "unauthorized": {
        "detail": "this server requires a token",
        "hint": "send `Authorization: Bearer TOKEN`; the SDK and CLI read it from DRAY_TOKEN",
    },
    "forbidden": {
        "detail": "this server does not accept requests for the host 'evil.example.org'",
        "hint": (
            "use localhost or the server's IP address in the URL, or add the host to "
            "DRAY_ALLOWED_HOSTS"
        ),
    },
    "data_source_forbidden": {
        "detail": "169.254.169.254 is an address of the cluster's own network",
        "pointer": "/data/source",
    },
    "webhook_url_forbidden": {
        "detail": "10.0.0.7 is not allowed as a receiver: 10.0.0.7 is a private address",
        "pointer": "/url",
        "hint": "the operator can allow private hosts, even without https, in "
        "DRAY_WEBHOOK_PRIVATE_HOSTS",
    },
    "webhook_not_found": {
        "detail": f"there is no webhook {WEBHOOK_ID}",
        "hint": "`dray webhook ls` lists the existing webhooks",
    },
    "download_link_not_found": {
        "detail": "this link no longer works: it has been used, is older than 60 s, or its "
        "token is no longer valid",
        "hint": "request another link with POST /v1/jobs/ID/downloads, or press the button again",
    },
    "client_not_found": {
        "detail": f"job {JOB_ID} has no client 7",
        "hint": f"`dray federate clients {JOB_ID}` shows the invited clients",
    },
    "not_federated": {
        "detail": f"job {JOB_ID} has no clients outside of the cluster",
        "hint": "set `federated: {http: {}}` in the job document",
    },
    "too_many_clients": {
        "detail": "federated.clients is 2, and 2 clients have already been invited",
        "hint": f"`dray federate revoke {JOB_ID} CLIENT` removes a client",
    },
    "round_over": {
        "detail": "round '000000000012-9f86d081884c7d65' is over",
        "hint": "request the round again",
    },
    "bad_update": {
        "detail": "part 0 of the update is missing",
        "hint": "send this part, then send the update again",
    },
    "too_many_webhooks": {
        "detail": "ann has 20 webhooks, the maximum per user",
        "hint": "delete a webhook that is no longer needed: `dray webhook ls` lists your webhooks",
    },
    "schedule_not_found": {
        "detail": "there is no schedule nightly",
        "hint": "`dray schedule ls` lists the existing schedules",
    },
    "schedule_exists": {
        "detail": "ann already has a schedule 'nightly'",
        "pointer": "/name",
        "hint": "choose another name, or change the existing schedule: "
        "`dray schedule change nightly`",
    },
    "too_many_schedules": {
        "detail": "ann has 100 schedules, the maximum per user",
        "hint": "delete a schedule that is no longer needed, or ask the operator to raise "
        "DRAY_MAX_SCHEDULES",
    },
    "run_unfinished": {
        "detail": f"{JOB_ID}, the previous run of the schedule 'nightly', has not ended",
        "hint": "wait until it has ended, cancel it, or change the schedule's overlap",
    },
    "webhook_disabled": {
        "detail": (
            f"the webhook {WEBHOOK_ID} is disabled: the receiver responded with status 410, so it "
            "accepts no more messages"
        ),
        "hint": f"`dray webhook enable {WEBHOOK_ID}` enables the webhook",
    },
    "job_not_found": {
        "detail": f"there is no job {OTHER_ID}",
        "hint": "`dray ls` shows the existing jobs",
    },
    "artifact_not_found": {
        "detail": f"the job {JOB_ID} has no artifact artifact-0",
        "hint": "list the job's artifacts to find their ids",
    },
    "drill_not_found": {
        "detail": f"the job {JOB_ID} has no drill drill-0",
        "hint": "list the job's drills to find their ids",
    },
    "experiment_not_found": {
        "detail": "no job belongs to the experiment 'digits'",
        "hint": "set the label in the job document: `labels: {experiment: ...}`",
    },
    "invalid_search": {
        "detail": "column 14: expected a number, found the end",
        "pointer": "/where",
    },
    "not_comparable": {
        "detail": f"{JOB_ID} is a single job without a baseline",
        "hint": "specify another job, or pin a baseline for the experiment: "
        "dray experiment baseline EXPERIMENT JOB",
    },
    "too_many_tags": {
        "detail": f"{JOB_ID} would have 33 tags: at most 32 are allowed",
        "pointer": "/add_tags",
    },
    "annotations_changed": {
        "detail": f"the tags and notes of {JOB_ID} have changed and are now at revision 4",
        "hint": "read the current tags and notes again, and apply your change to them",
    },
    "experiment_changed": {
        "detail": "the experiment 'digits' has changed and is now at revision 3, changed by bob",
        "hint": "read the experiment again, and apply your change to it",
    },
    "not_found": {"detail": "there is nothing at /v1/nothing"},
    "method_not_allowed": {
        "detail": "PUT is not allowed on /v1/jobs",
        "hint": "it takes GET, POST",
    },
    "idempotency_in_flight": {
        "detail": "a request with this Idempotency-Key is being processed",
        "hint": "repeat the request in a moment to get the response to the first request",
    },
    "not_confirmed": {
        "detail": "the filter matches all jobs, so the number of jobs to change, 120, must be "
        "confirmed",
        "pointer": "/max",
        "hint": "if you want to change all of these jobs, repeat the request with max: 120",
    },
    "job_finished": {"detail": f"the job {JOB_ID} has already succeeded"},
    "job_live": {
        "detail": f"the job {JOB_ID} is RUNNING, and only a finished job can be deleted",
        "hint": "cancel the job first, and wait until it has ended",
    },
    "job_not_running": {
        "detail": f"the job {JOB_ID} is QUEUED: it holds no slots",
        "hint": f"`dray wait {JOB_ID} --state RUNNING` waits until the job is training",
    },
    "job_not_waiting": {
        "detail": f"the job {JOB_ID} is RUNNING: only a waiting job can be held, released or moved",
        "hint": f"`dray preempt {JOB_ID}` makes the job release its slots and wait again",
    },
    "too_many_requests": {
        "detail": "the server processes 2 requests of this kind per caller at a time, and 16 "
        "more are waiting",
        "hint": "try again when some of your requests have finished",
    },
    "queue_full": {
        "detail": "5 jobs of ann wait in the queue 'night', which is the maximum that a user "
        "may have",
        "pointer": "/queue",
        "hint": "wait until one of the waiting jobs has started, or choose another queue",
    },
    "queue_in_use": {
        "detail": "3 jobs in the queue 'night' have not ended",
        "hint": "move or cancel these jobs first, or wait until they have ended",
    },
    "queue_not_found": {
        "detail": "there is no queue 'night'",
        "hint": "`dray queue ls` shows the existing queues",
    },
    "decision_not_found": {
        "detail": "scheduling round 17 is not stored",
        "hint": "rounds are kept for 6 hours",
    },
    "unknown_queue": {
        "detail": "there is no queue 'nigth'; the queues are default, night",
        "pointer": "/queue",
        "hint": "did you mean 'night'?",
    },
    "queue_holds_no_jobs": {
        "detail": "the queue 'lab' is the parent of other queues, so it can't hold jobs",
        "pointer": "/queue",
        "hint": "choose a queue under it: day, night",
    },
    "priority_too_high": {
        "detail": "is 90, but the maximum of the queue 'night' is 70",
        "pointer": "/priority",
        "hint": "an admin can raise the job's priority after its submission",
    },
    "runtime_too_long": {
        "detail": "is 172800 s, but the maximum of the queue 'night' is 86400 s",
        "pointer": "/max_runtime_s",
        "hint": "set max_runtime_s to at most 86400, or choose another queue",
    },
    "invalid_queue": {
        "detail": "is 4 GPU, which is less than the quota of 8 GPU",
        "pointer": "/limit/GPU",
        "hint": "raise the limit or lower the quota",
    },
    "headers_too_large": {
        "detail": "at most 128 headers, totaling at most 65536 bytes, are allowed"
    },
    "body_too_large": {"detail": "the body is larger than 1048576 bytes"},
    "unsupported_media_type": {
        "detail": "the content type is 'text/yaml', not application/json",
        "hint": "`dray submit` converts a YAML document to JSON",
    },
    "invalid_document": {
        "detail": "there is no field 'epocs'",
        "pointer": "/train/epocs",
        "hint": "did you mean 'epochs'?",
    },
    "invalid_parameter": {"detail": "the parameter 'limit' must be less than or equal to 500"},
    "unsatisfiable": {
        "detail": "this job could never start: it needs 8 GPUs, but the cluster has 4",
        "pointer": "/resources/num_workers",
        "hint": (
            "request fewer resources, or add nodes to the cluster; `dray cluster` shows the "
            "cluster's nodes"
        ),
    },
    "out_of_memory": {
        "detail": "this job can't fit: each worker needs 96.2 GiB, but has 78.0 GiB; 18.2 GiB "
        "(19542101196 bytes) are missing",
        "pointer": "/parallel",
        "hint": "it fits with train.micro_batch_size 8",
    },
    "not_plannable": {"detail": "the size of the images is unknown: set data.image_size"},
    "drill_impossible": {
        "detail": "there is no rank 2: the job has ranks 0 to 1",
        "pointer": "/rank",
    },
    "idempotency_key_reused": {
        "detail": "this Idempotency-Key was already used for another request",
        "hint": _UNIQUE,
    },
    "array_not_found": {
        "detail": f"there is no array {ARRAY_ID}",
        "hint": "`dray ls` lists the existing jobs and arrays",
    },
    "array_too_large": {
        "detail": "the array has 10,000,000 jobs, but this server allows at most 10,000",
        "pointer": "/array/size",
        "hint": "split the array; the operator can raise DRAY_MAX_ARRAY_SIZE",
    },
    "sweep_not_found": {
        "detail": f"there is no sweep {ARRAY_ID}",
        "hint": "`dray ls` lists the existing jobs and sweeps",
    },
    "invalid_trial": {
        "detail": "trial 3 (train.optimizer.name=adamw, train.optimizer.momentum=0.9) is not a "
        "valid job: /train/optimizer momentum is an option of sgd, not of adamw",
        "pointer": "/sweep/parameters",
        "hint": "remove the values that can't be combined",
    },
    "sampler_unavailable": {
        "detail": "Optuna is not installed on this server",
        "pointer": "/sweep/sampler",
        "hint": "use random or grid, or ask the operator to run pip install 'dray[optuna]'",
    },
    "dependency_not_found": {
        "detail": f"there is no job or array {OTHER_ID}",
        "pointer": "/after/0/job",
        "hint": "`dray ls` shows the existing jobs",
    },
    "dependency_never_satisfied": {
        "detail": "this job could never start: it depends on the success of "
        f"{OTHER_ID}, which failed",
        "pointer": "/after/0",
        "hint": "use `on: end` to start the job after the other job has ended, whatever the result",
    },
    "bad_upload": {
        "detail": "the path '../train.py' has a component that is empty, `.` or `..`",
        "pointer": "/files/0/path",
    },
    "upload_too_large": {
        "detail": "the files total 600000000 bytes, but at most 536870912 bytes are allowed",
        "hint": "exclude data with .drayignore, or raise DRAY_CODE_LIMIT_BYTES",
    },
    "code_unfit": {
        "detail": "there is no file 'main.py' in the code",
        "pointer": "/script/entrypoint",
        "hint": "it has train.py, model.py",
    },
    "licence_not_accepted": {
        "detail": "the model 'llama-8b' requires that you accept its licence, 'Llama 3.1 Community "
        "License'",
        "pointer": "/model/accept_licence",
        "hint": "read it with `dray model bases llama-8b`, and set model.accept_licence to true",
    },
    "file_not_found": {
        "detail": "there is no file file-01krt2jv8h5z8dxqk9n3s7p4vw",
        "pointer": "/training_file",
    },
    "model_not_found": {
        "detail": "there is no model 'digits'",
        "hint": "`dray model ls` lists the models",
    },
    "init_from_not_found": {
        "detail": f"the job {OTHER_ID} has no checkpoint at step 7",
        "pointer": "/init_from/step",
    },
    "init_from_differs": {
        "detail": f"can't continue from the full state of {OTHER_ID}: /train/seed is 1, but was "
        "0: the samples would have a different order",
        "pointer": "/train/seed",
        "hint": "change this field, or set init_from.take to weights",
    },
    "internal_error": {
        "detail": "dray failed to process this request: see the error in the server's log",
        "hint": "search the log for this request_id",
    },
    "unavailable": {"detail": "the service does not respond", "hint": "try again in a moment"},
    "database_unavailable": {
        "detail": "the database does not respond",
        "hint": "try again in a moment",
    },
    "storage_unavailable": {"detail": "the storage can't be read"},
    "quota_exceeded": {
        "detail": "the storage is full",
        "hint": "delete finished jobs (`dray delete`), or ask the operator for more space",
    },
}
"""For each problem code, the detail of its example and, for some codes, the pointer and the hint.

If a code has no entry, the detail is the docstring of its exception in the SDK."""


def problem(code: str, status: int) -> dict[str, Any]:
    """Return an example of a problem with this code."""
    return {
        "type": f"urn:dray:problem:{code}",
        "title": title(status),
        "status": status,
        "code": code,
        **(PROBLEMS.get(code) or {"detail": " ".join((CODES[code].__doc__ or "").split())}),
        "request_id": "5642cea436f4434fed64cbbd",
    }
