"""What is shown of a job beside its state, such as that its training diverged."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("warnings", sa.JSON(none_as_null=True), nullable=True))
