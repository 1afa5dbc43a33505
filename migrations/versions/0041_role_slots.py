"""Scripts whose roles have resources of their own: any number of roles, at any of the ranks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

_ATTEMPT = ("job_id", "attempt")


def upgrade() -> None:
    for name, keys in (("jobs", ("id",)), ("attempts", _ATTEMPT), ("deleted_attempts", _ATTEMPT)):
        op.execute(f"ALTER TABLE {name} RENAME COLUMN servers TO roles")
        _as_roles(name, keys, "num_workers" if name == "jobs" else "slices")


def _as_roles(name: str, keys: tuple[str, ...], size: str) -> None:
    """Parameter servers are one role, and have the last ranks. size: the column that tells how many
    ranks there are."""
    types = {"roles": sa.JSON(), "slices": sa.JSON()}
    table = sa.table(name, *(sa.column(each, types.get(each)) for each in (*keys, size, "roles")))
    session = op.get_bind()
    for row in session.execute(sa.select(table).where(table.c.roles.is_not(None))).mappings().all():
        servers, of = row["roles"], row[size]
        if servers is not None:  # JSON's null
            total = of if name == "jobs" else sum(part["num_workers"] for part in of)
            role = {"role": "server", "first_rank": total - servers["number"], **servers}
            is_it = (table.c[key] == row[key] for key in keys)
            session.execute(sa.update(table).where(*is_it).values(roles=[role]))
