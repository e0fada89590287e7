"""Engines for SQLite and PostgreSQL, set up so that what was answered with 201 survives a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from pitstop.errors import FieldProblem, InvalidInputError, show_value

BUSY_TIMEOUT_S = 5
_IMMEDIATE = "pitstop_begin_immediate"


def parse_url(text: str) -> URL:
    """Check a database URL and choose the driver.

    Raises:
        InvalidInputError: not a URL, not a database that is supported, or an in-memory SQLite.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        raise _refused("(not shown)", "not a database URL") from None
    shown = url.render_as_string(hide_password=True)
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise _refused(show_value(shown), f"{url.drivername} is not supported")
    if sqlite_path(url) is None:
        raise _refused(
            show_value(shown), "an in-memory database loses everything and is not shared between threads"
        )
    return url


def _refused(value: str, problem: str) -> InvalidInputError:
    remedy = "Give sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME."
    return InvalidInputError("unusable database", [FieldProblem("database-url", value, problem, remedy)])


def sqlite_path(url: URL) -> Path | None:
    """The file of an SQLite URL; None in memory or for another database."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:") or "mode" in url.query:
        return None
    return Path(str(url.database))


def build_engine(text: str, *, foreign_keys: bool = True) -> Engine:
    """Make an engine; no connection is opened yet.

    Args:
        text: database URL.
        foreign_keys: off only for migrations, because SQLite alters a table by copying and dropping it.

    Raises:
        InvalidInputError: see ``parse_url``.
    """
    url = parse_url(text)
    options: dict[str, Any] = {
        "pool_size": 10,
        "max_overflow": 30,
        "pool_timeout": 10,
        "json_serializer": _dumps,
    }
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, **options)
        _set_up_sqlite(engine, foreign_keys)
        return engine
    return create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": BUSY_TIMEOUT_S}, **options)


def reading(engine: Engine) -> Engine:
    """The same pool for transactions that only read: one snapshot for all queries of a request."""
    return (
        engine.execution_options(isolation_level="REPEATABLE READ") if engine.name == "postgresql" else engine
    )


def writing(engine: Engine) -> Engine:
    """The same pool for transactions that write.

    SQLite cannot wait when a reader turns writer after another has written (the busy timeout does not apply), so a
    writing transaction takes the lock at its beginning.
    """
    return engine.execution_options(**{_IMMEDIATE: True})


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _set_up_sqlite(engine: Engine, foreign_keys: bool) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = (
            None  # the driver would begin late and commit before DDL; we begin ourselves
        )
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"foreign_keys = {'ON' if foreign_keys else 'OFF'}",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get(_IMMEDIATE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
