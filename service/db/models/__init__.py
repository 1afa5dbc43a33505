"""The database tables. The SQL that reads and writes the tables is in `repositories`."""

from service.db.models.attempts import *
from service.db.models.base import *
from service.db.models.browser_sessions import *
from service.db.models.cluster import *
from service.db.models.code import *
from service.db.models.costs import *
from service.db.models.federation import *
from service.db.models.fine_tuning import *
from service.db.models.jobs import *
from service.db.models.media import *
from service.db.models.queues import *
from service.db.models.registry import *
from service.db.models.reports import *
from service.db.models.reservations import *
from service.db.models.schedules import *
from service.db.models.tracking import *
from service.db.models.usage import *
from service.db.models.webhooks import *
