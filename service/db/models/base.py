"""Definitions that all tables share: names of constraints, types of columns, and the job key."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, LargeBinary, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dray.views import JobState
from service.db.types import StateType, UtcDateTime

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        JobState: StateType(),
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
        int: BigInteger(),
        float: Float(53),
        str: Text(),
        bytes: LargeBinary(),
    }


def job_key() -> Mapped[str]:
    return mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, sort_order=-1
    )
