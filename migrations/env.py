"""Run by Alembic inside the transaction that `service.db.migrate` opened."""

from __future__ import annotations

from alembic import context

from service.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=False,  # the transaction belongs to the caller
)
context.run_migrations()
