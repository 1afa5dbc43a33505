"""Examples of every request, response and problem, for the description of the API."""

from collections.abc import Mapping
from typing import Any

from api.examples import automation, cluster, jobs, scheduling, tracking
from api.examples.cluster import PROMETHEUS as PROMETHEUS
from api.examples.jobs import EVENT_STREAM as EVENT_STREAM
from api.examples.parts import DOCUMENT as DOCUMENT
from api.examples.parts import SCHEMA as SCHEMA
from api.examples.problems import problem as problem
from api.examples.requests import REQUESTS as REQUESTS
from api.examples.tracking import JOB_TABLE as JOB_TABLE

VIEWS: Mapping[str, Mapping[str, Any]] = {
    **jobs.VIEWS,
    **tracking.VIEWS,
    **scheduling.VIEWS,
    **automation.VIEWS,
    **cluster.VIEWS,
}
"""Response bodies, keyed by schema name."""
