"""Examples of every request, response and problem, for the description of the API."""

from api.examples.parts import DOCUMENT as DOCUMENT
from api.examples.parts import SCHEMA as SCHEMA
from api.examples.problems import problem as problem
from api.examples.requests import REQUESTS as REQUESTS
from api.examples.views import EVENT_STREAM as EVENT_STREAM
from api.examples.views import PROMETHEUS as PROMETHEUS
from api.examples.views import VIEWS as VIEWS
