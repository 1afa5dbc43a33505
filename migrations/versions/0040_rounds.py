"""The open round of silos, and `federated.deadline_s` where documents had another field."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0039"

OLD = ("federated", "http", "deadline_s")


def upgrade() -> None:
    op.add_column("attempts", sa.Column("silo_round", sa.JSON()))
    _move("jobs", "id", "spec")
    _move("sweeps", "array_id", "base")
    values = sa.table("document_values", sa.column("pointer"))
    old, new = "/federated/http/deadline_s", "/federated/deadline_s"
    op.execute(values.update().where(values.c.pointer == old).values(pointer=new))


def _move(table: str, key: str, column: str) -> None:
    connection = op.get_bind()
    rows = sa.table(table, sa.column(key), sa.column(column, sa.JSON))
    document = rows.c[column]
    affected = sa.select(rows.c[key]).where(document[OLD].as_string().is_not(None))
    for name in connection.scalars(affected).all():
        is_one = rows.c[key] == name
        found = connection.scalar(sa.select(document).where(is_one))
        federated = found["federated"]
        federated["deadline_s"] = federated["http"].pop("deadline_s")
        connection.execute(rows.update().where(is_one).values({column: found}))
