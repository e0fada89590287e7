"""Alembic's entry point. `pitstop db` hands a connection in; `alembic -c migrations/alembic.ini` makes its own."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from pitstop_service.database.engine import build_engine, writing
from pitstop_service.database.tables import METADATA
from pitstop_service.settings import Settings

# Any constant does, as long as it is the same for everybody who migrates this database.
_LOCK = 0x7069_7473_746F_70


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection, target_metadata=METADATA, render_as_batch=True, compare_type=True
    )
    with context.begin_transaction():
        if (
            connection.dialect.name == "postgresql"
        ):  # two that migrate at once take turns; SQLite's writers always do
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        context.run_migrations()
        if connection.dialect.name == "sqlite":
            broken = connection.execute(text("PRAGMA foreign_key_check")).all()
            if broken:
                raise RuntimeError(
                    f"the migration leaves {len(broken)} rows that refer to nothing; it was undone"
                )


if context.is_offline_mode():
    raise SystemExit("Migrations need a database; generating SQL without one is not supported.")
given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    engine = build_engine(Settings().database_url, foreign_keys=False)
    with writing(engine).connect() as own:
        migrate(own)
        own.commit()
    engine.dispose()
