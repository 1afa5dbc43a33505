"""The prices file (DRAY_PRICES_FILE). Changes take effect with the next report of an attempt.

The file is YAML or JSON, with a currency (any string) and rules. If the file becomes invalid or is
deleted while the service runs, the previous prices still apply.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dray.documents import parse_yaml
from dray.errors import SpecError
from dray.input.names import unfit
from dray.input.validation import Fault, check_as, check_values
from dray.spec.fields import Document, Number, wrong
from service.config.start_refusals import StartRefused
from service.domain.costs.prices import PriceRule, Prices, unreachable

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
MAX_RULES = 1000
MAX_PER_HOUR = 1e9
SETTLED_NS = 1_000_000_000
"""A file that was changed within this time is read again, because another change might not change
its timestamp."""


def _plain(value: str) -> str:
    if (found := unfit(value)) is not None:
        raise ValueError(f"must not contain {found}")
    return value


def _visible(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be blank")
    return _plain(value)


Currency = Annotated[str, StringConstraints(min_length=1, max_length=16), AfterValidator(_visible)]
LabelName = Annotated[
    str, StringConstraints(min_length=1, max_length=317), AfterValidator(_visible)
]
NodeLabels = Annotated[
    dict[LabelName, Annotated[str, StringConstraints(max_length=255), AfterValidator(_plain)]],
    Field(max_length=64),
]
"""Labels of Ray nodes. A key consists of a prefix of up to 253 characters, a slash, and a name of
up to 63 characters."""


class PriceEntry(Document):
    """A rule in the file."""

    resource: Literal["slot", "CPU", "GPU", "memory"]
    per_hour: Annotated[Number, Field(ge=0, le=MAX_PER_HOUR)]
    labels: NodeLabels = Field(default_factory=dict)


class PriceList(Document):
    """The content of the file."""

    currency: Currency
    prices: Annotated[list[PriceEntry], Field(max_length=MAX_RULES)]

    @model_validator(mode="after")
    def _each_is_of_use(self) -> PriceList:
        if (found := unreachable(self.as_prices().rules)) is not None:
            late, early = found
            raise wrong(
                f"/prices/{late}",
                "never applies, because the first rule that matches a node is used, and "
                f"prices/{early} matches all nodes that this rule matches: put the rule with more "
                "labels first",
            )
        return self

    def as_prices(self) -> Prices:
        rules = (PriceRule(e.resource, e.per_hour, dict(e.labels)) for e in self.prices)
        return Prices(self.currency, tuple(rules))


class BadPricesFile(StartRefused):
    """Raised if DRAY_PRICES_FILE can't be read or is invalid."""


def load_prices(path: Path) -> Prices:
    """Read the prices file. Raises BadPricesFile with a message about the invalid field."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise BadPricesFile(f"DRAY_PRICES_FILE {path} can't be read: {error}") from None
    except UnicodeDecodeError:
        raise BadPricesFile(f"DRAY_PRICES_FILE {path} is not UTF-8 text") from None
    if len(content) > MAX_BYTES:
        raise BadPricesFile(f"DRAY_PRICES_FILE {path} is larger than {MAX_BYTES} bytes")
    return parse(text, f"DRAY_PRICES_FILE {path}")


def parse(text: str, source: str) -> Prices:
    """Parse prices. Raises BadPricesFile, whose message names `source`, if the text is invalid."""
    try:
        document: Any = parse_yaml(text, source=source)
    except SpecError as error:
        raise BadPricesFile(str(error)) from None
    except ValueError:  # a number with more digits than int() accepts
        raise BadPricesFile(f"{source}: a number has more than 4,300 digits") from None
    if not isinstance(document, dict):
        raise BadPricesFile(
            f"{source}: the file must contain `currency`, such as EUR, and a list `prices`"
        )
    try:
        check_values(document)
        return check_as(PriceList, document).as_prices()
    except Fault as fault:
        path = (fault.pointer or "").removeprefix("/")
        hint = f" ({fault.hint})" if fault.hint else ""
        problem = f"{path} {fault.detail}" if path else fault.detail
        raise BadPricesFile(f"{source}: {problem}{hint}") from None


class PricesFile:
    """The current prices. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """Read the file; None if the deployment has no prices. Raises BadPricesFile."""
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._prices = None if path is None else load_prices(path)
        self._problem: str | None = None

    def current(self) -> Prices | None:
        """Return the prices; None if the deployment has no prices. If the file has changed, it is
        read first."""
        if self._path is not None:
            with self._lock:
                self._refresh(self._path)
        return self._prices

    @property
    def problem(self) -> str | None:
        """The error in the changed file; None if there is none. While there is an error, the
        previous prices still apply."""
        return self._problem

    def _refresh(self, path: Path) -> None:
        try:
            stat = path.stat()
        except OSError as error:
            self._seen = None
            return self._keep(f"DRAY_PRICES_FILE {path} can't be read: {error}")
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if version == self._seen:
            return None
        try:
            self._prices = load_prices(path)
            self._problem = None
        except BadPricesFile as error:
            self._keep(str(error))
        is_settled = abs(time.time_ns() - stat.st_mtime_ns) > SETTLED_NS
        self._seen = version if is_settled else None
        return None

    def _keep(self, problem: str) -> None:
        if problem != self._problem:
            logger.error(
                "the prices file can't be used, so the previous prices still apply: %s", problem
            )
        self._problem = problem
