"""Examples of every request, response and problem, for the description of the API."""

from api.examples.bodies import EVENT_STREAM as EVENT_STREAM
from api.examples.bodies import PROMETHEUS as PROMETHEUS
from api.examples.bodies import REQUESTS as REQUESTS
from api.examples.bodies import VIEWS as VIEWS
from api.examples.parts import DOCUMENT as DOCUMENT
from api.examples.parts import SCHEMA as SCHEMA
from api.examples.problems import problem as problem
