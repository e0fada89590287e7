"""Schema revisions. Migrations are run explicitly; the service only checks that they have been."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine

from pitstop.errors import FieldProblem, InvalidInputError, PitstopError, show_value

from .engine import build_engine, sqlite_path, writing

_PACKAGE = Path(__file__).resolve().parents[1]
# Alembic's `op` and `context` are global to the process, so two migrations in two threads would mix up connections.
_ONE_AT_A_TIME = threading.Lock()
_PLACES = (_PACKAGE / "_migrations", _PACKAGE.parents[1] / "migrations")


@dataclass(frozen=True, slots=True)
class SchemaState:
    """Which revision a database has and which one this version of Pitstop needs; None: no schema at all."""

    current: str | None
    head: str

    @property
    def at_head(self) -> bool:
        """Whether the two are the same."""
        return self.current == self.head

    @property
    def remedy(self) -> str:
        """What to do if they are not."""
        found = self.current or "nothing"
        return f"The database schema is at {found}, needed is {self.head}: run `pitstop db upgrade`."


def scripts_dir() -> Path:
    """The migration scripts: packaged with a wheel, at the root of a checkout.

    Raises:
        PitstopError: neither is there.
    """
    for place in _PLACES:
        if (place / "env.py").is_file():
            return place
    raise PitstopError("migration scripts are missing from this installation; install Pitstop again")


@cache
def head_revision() -> str:
    """The newest revision that the scripts know."""
    head = ScriptDirectory(str(scripts_dir())).get_current_head()
    if head is None:
        raise PitstopError("there are no migrations")
    return head


def schema_state(engine: Engine) -> SchemaState:
    """Compare a database with the scripts; never creates a file.

    Raises:
        sqlalchemy.exc.OperationalError: the database cannot be reached.
    """
    path = sqlite_path(engine.url)
    if path is not None and not path.exists():
        return SchemaState(None, head_revision())
    with engine.connect() as connection:
        return SchemaState(MigrationContext.configure(connection).get_current_revision(), head_revision())


def upgrade(url: str, revision: str = "head") -> SchemaState:
    """Upgrade the schema; all steps in one transaction.

    Raises:
        InvalidInputError: the URL is unusable or the revision is unknown.
        sqlalchemy.exc.OperationalError: the database cannot be reached.
    """
    return _run(url, revision, command.upgrade)


def downgrade(url: str, revision: str) -> SchemaState:
    """Downgrade the schema, which drops what newer revisions added, data included; raises as ``upgrade``."""
    return _run(url, revision, command.downgrade)


def _run(url: str, revision: str, action: Callable[[Config, str], None]) -> SchemaState:
    engine = build_engine(url, foreign_keys=False)
    try:
        with _ONE_AT_A_TIME, writing(engine).connect() as connection:
            config = _config(connection)
            try:
                action(config, revision)
            except CommandError as error:
                remedy = (
                    "Give head, base, a revision's number or -1; `pitstop db current` shows what there is."
                )
                problem = FieldProblem("revision", show_value(revision), str(error), remedy)
                raise InvalidInputError("cannot migrate", [problem]) from None
            connection.commit()
        return schema_state(engine)
    finally:
        engine.dispose()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts_dir()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
