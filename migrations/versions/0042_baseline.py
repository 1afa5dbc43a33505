"""The first schema: the service upgrades databases from here on, and refuses older ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0042"
down_revision = None


def upgrade() -> None:
    _jobs()
    _costs()
    _cluster()
    _code()
    _queues()
    _tracking()
    _sweeps()
    _webhooks()
    _reports()
    _attempts()
    _downloads()
    _federation()
    _exports()
    op.execute("INSERT INTO queues (name) VALUES ('default')")


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("project", sa.String(255), nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("held_by", sa.String(255)),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_version", sa.BigInteger(), nullable=False),
        sa.Column("num_workers", sa.BigInteger(), nullable=False),
        sa.Column("min_workers", sa.BigInteger()),
        sa.Column("bundle", sa.JSON(), nullable=False),
        sa.Column("roles", sa.JSON()),
        sa.Column("required_topology", sa.String(63)),
        sa.Column("homes", sa.JSON()),
        sa.Column("silo_sources", sa.JSON()),
        sa.Column("init_from", sa.JSON()),
        sa.Column("init_from_job", sa.String(64)),
        sa.Column("code", sa.String(64)),
        sa.Column("array_id", sa.String(64)),
        sa.Column("array_index", sa.BigInteger()),
        sa.Column("array_head", sa.String(64)),
        sa.Column("array_max_running", sa.BigInteger()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason_code", sa.String(64), nullable=False),
        sa.Column("reason_message", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger()),
        sa.Column("blocked_by", sa.JSON(), nullable=False),
        sa.Column("kept_back_s", sa.Float(53), server_default=sa.text("0"), nullable=False),
        sa.Column("kept_back_since", UtcDateTime()),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("not_before", UtcDateTime()),
        sa.Column("yields", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("user_failures", sa.BigInteger(), nullable=False),
        sa.Column("infra_failures", sa.BigInteger(), nullable=False),
        sa.Column("free_requeues", sa.BigInteger(), nullable=False),
        sa.Column("preemptions", sa.BigInteger(), nullable=False),
        sa.Column("max_user_retries", sa.BigInteger(), nullable=False),
        sa.Column("max_infra_retries", sa.BigInteger(), nullable=False),
        sa.Column("max_runtime_s", sa.BigInteger()),
        sa.Column("runtime_used_s", sa.Float(53), nullable=False),
        sa.Column("recoveries", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("slot_seconds", sa.JSON()),
        sa.Column("cost", sa.JSON()),
        sa.Column("progress", sa.JSON()),
        sa.Column("step_times", sa.JSON()),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("warnings", sa.JSON()),
        sa.Column("num_metric_keys", sa.BigInteger(), nullable=False),
        sa.Column("log_bytes", sa.BigInteger(), nullable=False),
        sa.Column("log_limit_bytes", sa.BigInteger(), nullable=False),
        sa.Column("log_lines_dropped", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("started_at", UtcDateTime()),
        sa.Column("first_step_at", UtcDateTime()),
        sa.Column("finished_at", UtcDateTime()),
        sa.Column("deleted_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_jobs_array_head",
        "jobs",
        ["id"],
        sqlite_where=sa.text("array_head IS NOT NULL"),
        postgresql_where=sa.text("array_head IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_array_id_state_array_index",
        "jobs",
        ["array_id", "state", "array_index"],
        sqlite_where=sa.text("array_id IS NOT NULL"),
        postgresql_where=sa.text("array_id IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_code",
        "jobs",
        ["code"],
        sqlite_where=sa.text("code IS NOT NULL"),
        postgresql_where=sa.text("code IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_deleted_at",
        "jobs",
        ["deleted_at"],
        sqlite_where=sa.text("deleted_at IS NOT NULL"),
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_finished_at",
        "jobs",
        ["finished_at"],
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_first_positions",
        "jobs",
        ["position"],
        sqlite_where=sa.text("position <= 20"),
        postgresql_where=sa.text("position <= 20"),
    )
    op.create_index(
        "ix_jobs_init_from_job",
        "jobs",
        ["init_from_job"],
        sqlite_where=sa.text("init_from_job IS NOT NULL"),
        postgresql_where=sa.text("init_from_job IS NOT NULL"),
    )
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"])
    op.create_index("ix_jobs_owner_id", "jobs", ["owner", "id"])
    op.create_index("ix_jobs_project_id", "jobs", ["project", "id"])
    op.create_index("ix_jobs_queue_id", "jobs", ["queue", "id"])
    op.create_index("ix_jobs_state_id", "jobs", ["state", "id"])
    op.create_index(
        "ix_jobs_state_priority_rank_number", "jobs", ["state", "priority", "rank", "number"]
    )
    op.create_index(
        "ix_jobs_step_times",
        "jobs",
        ["number"],
        sqlite_where=sa.text("step_times IS NOT NULL"),
        postgresql_where=sa.text("step_times IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_unfinished",
        "jobs",
        ["queue", "state", "owner"],
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index(
        "uq_jobs_array_id_array_index",
        "jobs",
        ["array_id", "array_index"],
        unique=True,
        sqlite_where=sa.text("array_id IS NOT NULL"),
        postgresql_where=sa.text("array_id IS NOT NULL"),
    )
    op.create_table(
        "job_dependencies",
        sa.Column("waiter", sa.String(64), nullable=False),
        sa.Column("after_id", sa.String(64), nullable=False),
        sa.Column("on_success", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("waiter", "after_id", name="pk_job_dependencies"),
    )
    op.create_index("ix_job_dependencies_after_id", "job_dependencies", ["after_id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("drill_id", sa.String(64)),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["jobs.id"],
            name="fk_idempotency_keys_job_id",
            ondelete="CASCADE",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.PrimaryKeyConstraint("owner", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_labels_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_labels"),
    )
    op.create_index("ix_job_labels_key_value_job_id", "job_labels", ["key", "value", "job_id"])


def _costs() -> None:
    op.create_table(
        "attempt_costs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=False),
        sa.Column("until", UtcDateTime(), nullable=False),
        sa.Column("currency", sa.String(16), nullable=False),
        sa.Column("slot_seconds", sa.Float(53), nullable=False),
        sa.Column("total", sa.Float(53), nullable=False),
        sa.Column("useful", sa.Float(53), nullable=False),
        sa.Column("unreported", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_attempt_costs"),
    )
    op.create_index("ix_attempt_costs_queue_until", "attempt_costs", ["queue", "until"])
    op.create_index("ix_attempt_costs_until", "attempt_costs", ["until"])
    op.create_table(
        "deleted_attempts",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("slices", sa.JSON(), nullable=False),
        sa.Column("bundle", sa.JSON(), nullable=False),
        sa.Column("roles", sa.JSON()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_deleted_attempts"),
    )
    op.create_index("ix_deleted_attempts_finished_at", "deleted_attempts", ["finished_at"])
    op.create_table(
        "slot_seconds",
        sa.Column("slot_class", sa.String(32), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("slot_class", name="pk_slot_seconds"),
    )


def _cluster() -> None:
    op.create_table(
        "autoscaling",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_nodes", sa.BigInteger(), nullable=False),
        sa.Column("bundles", sa.JSON(), nullable=False),
        sa.Column("asked_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("id", name="pk_autoscaling"),
    )
    op.create_table(
        "cluster",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("connected", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("ray_address", sa.Text()),
        sa.Column("ray_dashboard", sa.Text()),
        sa.Column("session", sa.Text()),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cluster"),
    )
    op.create_table(
        "deployment",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deployment"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(128), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("alive", sa.Boolean(), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("total", sa.JSON(), nullable=False),
        sa.Column("available", sa.JSON(), nullable=False),
        sa.Column("labels", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("quarantined", sa.JSON(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_nodes"),
    )
    op.create_table(
        "service_metrics",
        sa.Column("metric", sa.String(64), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("part", sa.String(16), nullable=False),
        sa.Column("value", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("metric", "label", "part", name="pk_service_metrics"),
    )
    op.create_table(
        "storage_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("used_bytes", sa.BigInteger()),
        sa.Column("free_bytes", sa.BigInteger()),
        sa.Column("problem", sa.Text()),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_storage_state"),
    )


def _code() -> None:
    op.create_table(
        "code",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("num_files", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_key", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "id", name="pk_code"),
    )
    op.create_table(
        "code_packs",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.Column("deleted_at", UtcDateTime()),
        sa.PrimaryKeyConstraint("key", name="pk_code_packs"),
    )
    op.create_index("ix_code_packs_owner", "code_packs", ["owner"])
    op.create_table(
        "code_parts",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("pack", sa.String(255), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["pack"], ["code_packs.key"], name="fk_code_parts_pack", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("owner", "sha256", name="pk_code_parts"),
    )
    op.create_index("ix_code_parts_pack", "code_parts", ["pack"])
    op.create_table(
        "code_uses",
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("pack", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(
            ["owner", "code"],
            ["code.owner", "code.id"],
            name="fk_code_uses_owner_code",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["pack"], ["code_packs.key"], name="fk_code_uses_pack"),
        sa.PrimaryKeyConstraint("owner", "code", "pack", name="pk_code_uses"),
    )
    op.create_index("ix_code_uses_pack", "code_uses", ["pack"])


def _queues() -> None:
    op.create_table(
        "decisions",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_decisions"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_decisions_made_at", "decisions", ["made_at"])
    op.create_table(
        "outlook",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("situation", sa.LargeBinary(), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outlook"),
    )
    op.create_table(
        "queues",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("weight", sa.Float(53), server_default=sa.text("1"), nullable=False),
        sa.Column("user_weights", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("quota", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("limit", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("user_limit", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("max_running", sa.BigInteger()),
        sa.Column("max_running_per_user", sa.BigInteger()),
        sa.Column("max_queued", sa.BigInteger()),
        sa.Column("max_queued_per_user", sa.BigInteger()),
        sa.Column("max_priority", sa.BigInteger(), server_default=sa.text("100"), nullable=False),
        sa.Column("budget", sa.Float(53)),
        sa.Column("monthly_budget", sa.Float(53)),
        sa.PrimaryKeyConstraint("name", name="pk_queues"),
    )
    op.create_table(
        "forecasts",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("of", sa.String(8), nullable=False),
        sa.Column("expected_at", UtcDateTime()),
        sa.Column("earliest_at", UtcDateTime()),
        sa.Column("latest_at", UtcDateTime()),
        sa.Column("not_before", UtcDateTime()),
        sa.Column("code", sa.String(64)),
        sa.Column("message", sa.Text()),
        sa.Column("num_assumed", sa.BigInteger(), nullable=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("first_expected_at", UtcDateTime()),
        sa.Column("first_made_at", UtcDateTime()),
        sa.Column("came_at", UtcDateTime()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_forecasts_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "of", name="pk_forecasts"),
    )
    op.create_index(
        "ix_forecasts_came_at",
        "forecasts",
        ["came_at"],
        sqlite_where=sa.text("came_at IS NOT NULL"),
        postgresql_where=sa.text("came_at IS NOT NULL"),
    )
    op.create_index(
        "ix_forecasts_open",
        "forecasts",
        ["of"],
        sqlite_where=sa.text("came_at IS NULL"),
        postgresql_where=sa.text("came_at IS NULL"),
    )


def _tracking() -> None:
    op.create_table(
        "document_values",
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("pointer", sa.String(255), nullable=False),
        sa.Column("number", sa.Float(53)),
        sa.Column("text", sa.String(255)),
        sa.PrimaryKeyConstraint("holder", "pointer", name="pk_document_values"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_document_values_search", "document_values", ["pointer", "text", "number", "holder"]
    )
    op.create_table(
        "experiments",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("baseline", sa.String(64)),
        sa.ForeignKeyConstraint(
            ["baseline"], ["jobs.id"], name="fk_experiments_baseline", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("name", name="pk_experiments"),
    )
    op.create_index("ix_experiments_baseline", "experiments", ["baseline"])
    op.create_table(
        "job_annotations",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("updated_by", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_annotations_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_job_annotations"),
    )
    op.create_table(
        "job_tags",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("tag", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_job_tags_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "tag", name="pk_job_tags"),
    )
    op.create_index("ix_job_tags_tag_job_id", "job_tags", ["tag", "job_id"])
    op.create_table(
        "metric_summaries",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_value", sa.Float(53)),
        sa.Column("min_step", sa.BigInteger()),
        sa.Column("min_value", sa.Float(53)),
        sa.Column("max_step", sa.BigInteger()),
        sa.Column("max_value", sa.Float(53)),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_metric_summaries_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_metric_summaries"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_metric_summaries_search",
        "metric_summaries",
        ["key", "last_value", "min_value", "max_value", "job_id"],
    )


def _sweeps() -> None:
    op.create_table(
        "sweeps",
        sa.Column("array_id", sa.String(64), nullable=False),
        sa.Column("sweep", sa.JSON(), nullable=False),
        sa.Column("base", sa.JSON(), nullable=False),
        sa.Column("num_trials", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("array_id", name="pk_sweeps"),
    )
    op.create_table(
        "trial_rungs",
        sa.Column("array_id", sa.String(64), nullable=False),
        sa.Column("rung", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("value", sa.Float(53)),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_trial_rungs_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("array_id", "rung", "job_id", name="pk_trial_rungs"),
    )
    op.create_index("ix_trial_rungs_job_id", "trial_rungs", ["job_id"])
    op.create_table(
        "trials",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("array_id", sa.String(64), nullable=False),
        sa.Column("array_index", sa.BigInteger(), nullable=False),
        sa.Column("parameters", sa.JSON()),
        sa.Column("value", sa.Float(53)),
        sa.Column("value_step", sa.BigInteger()),
        sa.Column("last_step", sa.BigInteger()),
        sa.Column("rung", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_trials_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_trials"),
    )
    op.create_index(
        "uq_trials_array_id_array_index", "trials", ["array_id", "array_index"], unique=True
    )


def _webhooks() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("webhook_id", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("next_try_at", UtcDateTime()),
        sa.Column("tried_at", UtcDateTime()),
        sa.Column("answer_status", sa.BigInteger()),
        sa.Column("answer_body", sa.Text()),
        sa.Column("answer_error", sa.Text()),
        sa.Column("took_s", sa.Float(53)),
        sa.PrimaryKeyConstraint("number", name="pk_webhook_deliveries"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_webhook_deliveries_waiting",
        "webhook_deliveries",
        ["webhook_id", "next_try_at"],
        sqlite_where=sa.text("next_try_at IS NOT NULL"),
        postgresql_where=sa.text("next_try_at IS NOT NULL"),
    )
    op.create_index(
        "ix_webhook_deliveries_webhook_id_number", "webhook_deliveries", ["webhook_id", "number"]
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("states", sa.JSON(), nullable=False),
        sa.Column("queue", sa.String(64)),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("all_users", sa.Boolean(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("failing_since", UtcDateTime()),
        sa.Column("paused_until", UtcDateTime()),
        sa.Column("disabled_at", UtcDateTime()),
        sa.Column("disabled_code", sa.String(64)),
        sa.Column("disabled_message", sa.Text()),
        sa.Column("enabled_by", sa.String(255)),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index(
        "ix_webhooks_enabled",
        "webhooks",
        ["owner"],
        sqlite_where=sa.text("disabled_at IS NULL"),
        postgresql_where=sa.text("disabled_at IS NULL"),
    )
    op.create_index("ix_webhooks_owner", "webhooks", ["owner"])


def _reports() -> None:
    op.create_table(
        "artifacts",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_artifacts_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "id", name="pk_artifacts"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_checkpoints_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "step", name="pk_checkpoints"),
    )
    op.create_table(
        "log_chunks",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("next_number", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text()),
        sa.Column("storage_key", sa.Text()),
        sa.Column("left_out", sa.BigInteger()),
        sa.Column("refused_at", UtcDateTime()),
        sa.Column("dropped_bytes", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_log_chunks_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "rank", "first_line", name="pk_log_chunks"),
    )
    op.create_index(
        "ix_log_chunks_refused",
        "log_chunks",
        ["job_id"],
        sqlite_where=sa.text("refused_at IS NOT NULL"),
        postgresql_where=sa.text("refused_at IS NOT NULL"),
    )
    op.create_table(
        "metric_chunks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("first_value", sa.Float(53)),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_value", sa.Float(53)),
        sa.Column("min_step", sa.BigInteger()),
        sa.Column("min_value", sa.Float(53)),
        sa.Column("max_step", sa.BigInteger()),
        sa.Column("max_value", sa.Float(53)),
        sa.Column("nan_step", sa.BigInteger()),
        sa.Column("outline", sa.LargeBinary()),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_metric_chunks_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_metric_chunks"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_metric_chunks_last_step", "metric_chunks", ["job_id", "rank", "last_step"])
    op.create_index("ix_metric_chunks_open", "metric_chunks", ["job_id", "attempt", "is_open"])
    op.create_index(
        "uq_metric_chunks_series",
        "metric_chunks",
        ["job_id", "rank", "key", "attempt", "first_step"],
        unique=True,
    )
    op.create_table(
        "recent_metrics",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_recent_metrics_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_recent_metrics"),
    )
    op.create_index("ix_recent_metrics_job_id_attempt", "recent_metrics", ["job_id", "attempt"])
    op.create_table(
        "system_metrics",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("first_rank", sa.BigInteger(), nullable=False),
        sa.Column("is_lone", sa.Boolean(), nullable=False),
        sa.Column("mean_of", sa.BigInteger(), nullable=False),
        sa.Column("num_samples", sa.BigInteger(), nullable=False),
        sa.Column("last_time", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_system_metrics_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_system_metrics"),
    )
    op.create_index(
        "ix_system_metrics_job_id_first_rank", "system_metrics", ["job_id", "first_rank"]
    )


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("slices", sa.JSON(), nullable=False),
        sa.Column("carriers", sa.JSON()),
        sa.Column("held", sa.JSON()),
        sa.Column("held_until", UtcDateTime()),
        sa.Column("bundle", sa.JSON(), nullable=False),
        sa.Column("roles", sa.JSON()),
        sa.Column("silo_round", sa.JSON()),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("cluster_session", sa.Text(), nullable=False),
        sa.Column("cursor", sa.JSON(), nullable=False),
        sa.Column("resume_step", sa.BigInteger()),
        sa.Column("first_metric_step", sa.BigInteger()),
        sa.Column("first_metric_at", UtcDateTime()),
        sa.Column("last_metric_step", sa.BigInteger()),
        sa.Column("generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("slot_seconds", sa.JSON()),
        sa.Column("ledger_at", UtcDateTime()),
        sa.Column("lacking", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("grants", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("granted", sa.JSON()),
        sa.Column("recalled", sa.JSON()),
        sa.Column("recalled_at", UtcDateTime()),
        sa.Column("batch_size", sa.BigInteger()),
        sa.Column("batch_at", UtcDateTime()),
        sa.Column("grow_after", UtcDateTime()),
        sa.Column("recall_after", UtcDateTime()),
        sa.Column("grown_at", UtcDateTime()),
        sa.Column("shrunk_at", UtcDateTime()),
        sa.Column("growth", sa.JSON()),
        sa.Column("preempt_asked_at", UtcDateTime()),
        sa.Column("silent", sa.JSON()),
        sa.Column("preempt_grace_s", sa.Float(53)),
        sa.Column("num_errors", sa.BigInteger(), nullable=False),
        sa.Column("reason_code", sa.String(64)),
        sa.Column("reason_message", sa.Text()),
        sa.Column("failed_rank", sa.BigInteger()),
        sa.Column("exit_code", sa.BigInteger()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("started_at", UtcDateTime()),
        sa.Column("running_at", UtcDateTime()),
        sa.Column("finished_at", UtcDateTime()),
        sa.Column("receipt", sa.JSON()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_attempts_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", name="pk_attempts"),
    )
    op.create_index(
        "ix_attempts_finished_at",
        "attempts",
        ["finished_at"],
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_index(
        "uq_attempts_one_live",
        "attempts",
        ["job_id"],
        unique=True,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "drills",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("at_step", sa.BigInteger()),
        sa.Column("resumes", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.BigInteger()),
        sa.Column("recovery_s", sa.Float(53)),
        sa.Column("steps_lost", sa.BigInteger()),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("struck_at", UtcDateTime()),
        sa.Column("finished_at", UtcDateTime()),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_drills_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "id", name="pk_drills"),
    )
    op.create_index(
        "ix_drills_waiting",
        "drills",
        ["job_id"],
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("from_state", sa.String(16)),
        sa.Column("to_state", sa.String(16)),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_events_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_events"),
    )
    op.create_table(
        "hangs",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_hangs_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_hangs"),
    )


def _downloads() -> None:
    op.create_table(
        "download_links",
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(64)),
        sa.Column("target", sa.JSON(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_download_links_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("secret_sha256", name="pk_download_links"),
    )


def _federation() -> None:
    op.create_table(
        "federated_clients",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("invited_by", sa.String(255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("joined_at", UtcDateTime()),
        sa.Column("sent_round", sa.String(64)),
        sa.Column("sent_sha256", sa.String(64)),
        sa.Column("sent_at", UtcDateTime()),
        sa.Column("num_sent", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_federated_clients_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("token_sha256", name="pk_federated_clients"),
        sa.UniqueConstraint("job_id", "number", name="uq_federated_clients_job_id_number"),
    )
    op.create_table(
        "federated_rounds",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("clients", sa.JSON()),
        sa.Column("quorum", sa.BigInteger(), nullable=False),
        sa.Column("closes_at", UtcDateTime(), nullable=False),
        sa.Column("num_elements", sa.BigInteger(), nullable=False),
        sa.Column("awaits", sa.String(32), nullable=False),
        sa.Column("update_bytes", sa.BigInteger(), nullable=False),
        sa.Column("model_sha256", sa.String(64), nullable=False),
        sa.Column("model_size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("form_sha256", sa.String(64), nullable=False),
        sa.Column("form_size_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_federated_rounds_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_federated_rounds"),
    )


def _exports() -> None:
    op.create_table(
        "mlflow_exports",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.String(255)),
        sa.Column("event_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("after_step", sa.BigInteger(), server_default=sa.text("-1"), nullable=False),
        sa.Column("last_steps", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("artifacts", sa.JSON(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("failures", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("not_before", UtcDateTime()),
        sa.Column("problem", sa.Text()),
        sa.Column("is_complete", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_mlflow_exports_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", name="pk_mlflow_exports"),
    )
    op.create_index("ix_mlflow_exports_number", "mlflow_exports", ["number"])
    op.create_index(
        "ix_mlflow_exports_open",
        "mlflow_exports",
        ["number"],
        sqlite_where=sa.text("NOT is_complete"),
        postgresql_where=sa.text("NOT is_complete"),
    )
