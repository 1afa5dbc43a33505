"""The prices file (DRAY_PRICES_FILE). Changes take effect with the next report of an attempt.

The file contains a currency (any string) and rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dray.input.names import unfit
from dray.spec.fields import Document, Number, wrong
from service.config.operator_file import OperatorFile
from service.config.start_refusals import StartRefused
from service.domain.costs.prices import PriceRule, Prices, unreachable

MAX_RULES = 1000
MAX_PER_HOUR = 1e9


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


class PricesFile(OperatorFile[Prices]):
    """The current prices."""

    setting, contents = "DRAY_PRICES_FILE", "prices"
    expected = "`currency`, such as EUR, and a list `prices`"
    document, refusal = PriceList, BadPricesFile

    @classmethod
    def convert(cls, document: Any) -> Prices:
        assert isinstance(document, PriceList)
        return document.as_prices()
