"""Predictions, runs and steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Spelled out rather than imported from the models: a migration describes one moment, the models move on.
DOCUMENT = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "predictions",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("scenario_name", sa.String(120), nullable=False),
        sa.Column("scenario_digest", sa.String(64), nullable=False),
        sa.Column("calibration_id", sa.String(200), nullable=False),
        sa.Column("recommended", sa.String(60), nullable=False),
        sa.Column("budget_bytes", sa.BigInteger(), nullable=True),
        sa.Column("request", DOCUMENT, nullable=False),
        sa.Column("result", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_predictions"),
    )
    op.create_index(
        "ix_predictions_scenario_digest_created_at", "predictions", ["scenario_digest", "created_at"]
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("scenario_name", sa.String(120), nullable=False),
        sa.Column("scenario_digest", sa.String(64), nullable=False),
        sa.Column("plan_name", sa.String(60), nullable=False),
        sa.Column("arm", sa.String(60), nullable=True),
        sa.Column("pair_id", sa.String(100), nullable=True),
        sa.Column("warmup_steps", sa.Integer(), nullable=False),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("manifest", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_scenario_digest_plan_name", "runs", ["scenario_digest", "plan_name"])
    op.create_table(
        "steps",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("received_at", TIME, nullable=False),
        sa.Column("sleep_s", sa.Double(), nullable=True),
        sa.Column("update_weights_s", sa.Double(), nullable=True),
        sa.Column("wake_up_s", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("held_at_sync_bytes", sa.BigInteger(), nullable=True),
        sa.Column("held_in_rollout_bytes", sa.BigInteger(), nullable=True),
        sa.Column("host_pinned_bytes", sa.BigInteger(), nullable=True),
        sa.Column("record", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_steps_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_steps"),
    )


def downgrade() -> None:
    op.drop_table("steps")
    op.drop_index("ix_runs_scenario_digest_plan_name", table_name="runs")
    op.drop_table("runs")
    op.drop_index("ix_predictions_scenario_digest_created_at", table_name="predictions")
    op.drop_table("predictions")
