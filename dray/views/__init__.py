"""The responses of the API, used by both the server and the clients.

Times are RFC 3339 in UTC. A metric value that JSON cannot represent (NaN, infinities) is sent as
the string `"NaN"`, `"Infinity"` or `"-Infinity"`. Clients ignore unknown fields, so that they can
read responses from a newer server. This package re-exports every class of its modules.
"""

from dray.drills import DrillKind as DrillKind
from dray.drills import DrillState as DrillState
from dray.views.accounting import *
from dray.views.arrays import *
from dray.views.attempts import *
from dray.views.base import *
from dray.views.bulk import *
from dray.views.changes import *
from dray.views.cluster import *
from dray.views.faults import *
from dray.views.federation import *
from dray.views.jobs import *
from dray.views.media import *
from dray.views.models import *
from dray.views.outlook import *
from dray.views.planner import *
from dray.views.queues import *
from dray.views.registry import *
from dray.views.report_pages import *
from dray.views.reports import *
from dray.views.reservations import *
from dray.views.schedules import *
from dray.views.sign_in import *
from dray.views.tracking import *
from dray.views.usage import *
from dray.views.webhooks import *
