"""Migrations on both databases: there, back, there again, with data; models and scripts agree."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError, OperationalError

from pitstop.errors import InvalidInputError
from pitstop_service.app import create_app
from pitstop_service.database import migrations
from pitstop_service.database.engine import build_engine
from pitstop_service.database.tables import METADATA
from pitstop_service.settings import Settings

from . import documents
from .conftest import NewDatabase
from .server import running

TABLES = {"predictions", "runs", "steps"}


def _tables(url: str) -> set[str]:
    engine = build_engine(url)
    names = set(inspect(engine).get_table_names())
    engine.dispose()
    return names - {"alembic_version"}


def _store(url: str) -> None:
    with running(create_app(Settings(database_url=url)), url) as service:
        run = service.post("/v1/runs", documents.manifest())["id"]
        service.post(f"/v1/runs/{run}/steps", {"steps": [documents.step(n) for n in range(3)]})
        assert service.client.get(f"/v1/runs/{run}").json()["step_count"] == 3
        assert service.counts() == {"predictions": 0, "runs": 1, "steps": 3}


def test_up_down_up_with_data(empty_database: NewDatabase) -> None:
    url = empty_database()
    engine = build_engine(url)
    assert migrations.schema_state(engine).current is None
    assert migrations.upgrade(url).at_head
    assert _tables(url) == TABLES
    _store(url)
    assert migrations.upgrade(url).at_head, "upgrading again changes nothing"
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM steps")) == 3
    engine.dispose()

    assert migrations.downgrade(url, "base").current is None
    assert _tables(url) == set()
    assert migrations.upgrade(url).at_head
    _store(url)


def test_models_and_migrations_agree(new_database: NewDatabase) -> None:
    engine = build_engine(new_database())
    with engine.connect() as connection:
        assert (
            compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), METADATA)
            == []
        )
    engine.dispose()


def test_constraints_have_the_models_names(new_database: NewDatabase) -> None:
    engine = build_engine(new_database())
    inspector = inspect(engine)
    for table in METADATA.sorted_tables:
        assert inspector.get_pk_constraint(table.name)["name"] == table.primary_key.name
        named = {str(constraint.name) for constraint in table.foreign_key_constraints}
        assert {key["name"] for key in inspector.get_foreign_keys(table.name)} == named
    engine.dispose()


def test_unknown_revision_is_refused(empty_database: NewDatabase) -> None:
    url = empty_database()
    with pytest.raises(InvalidInputError, match="9999"):
        migrations.upgrade(url, "9999")
    assert _tables(url) == set()


def test_concurrent_upgrades_take_turns(empty_database: NewDatabase) -> None:
    """Two containers that start at once, and two threads of one process."""
    url, states = empty_database(), []
    code = "import sys; from pitstop_service.database.migrations import upgrade; assert upgrade(sys.argv[1]).at_head"
    others = [subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE) for _ in range(2)]
    failures = [process.communicate(timeout=60)[1].decode() for process in others]
    assert [process.returncode for process in others] == [0, 0], failures

    url = empty_database()
    threads = [threading.Thread(target=lambda: states.append(migrations.upgrade(url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [state.at_head for state in states] == [True] * 3


def test_a_failing_migration_leaves_nothing(empty_database: NewDatabase) -> None:
    """DDL is part of the transaction on both databases: `steps` exists already, so the script fails half-way."""
    url = empty_database()
    engine = build_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE steps (x INTEGER)"))
    with pytest.raises(Exception, match="steps"):
        migrations.upgrade(url)
    assert _tables(url) == {"steps"}
    engine.dispose()


def test_foreign_keys_are_enforced(new_database: NewDatabase) -> None:
    engine = build_engine(new_database())
    row = "INSERT INTO steps (run_id, step, digest, received_at, record) VALUES ('no', 1, '', CURRENT_TIMESTAMP, '{}')"
    with engine.connect() as connection, pytest.raises(IntegrityError):
        connection.execute(text(row))
    engine.dispose()


def test_sqlite_is_set_up_for_durability(sqlite_url: str) -> None:
    engine = build_engine(sqlite_url)
    with engine.connect() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    engine.dispose()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def test_server_is_postgresql_15_or_newer(postgres_server: object) -> None:
    url = postgres_server.url("postgres")  # type: ignore[attr-defined]
    engine = create_engine(url)
    with engine.connect() as connection:
        assert (connection.dialect.server_version_info or (0,)) >= (15,)
    engine.dispose()


def test_missing_sqlite_folder_is_an_operational_error(tmp_path: object) -> None:
    with pytest.raises(OperationalError):
        migrations.upgrade(f"sqlite:///{tmp_path}/none/pitstop.sqlite3")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://u:secret@h/d",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_unusable_urls(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build_engine(url)
    assert caught.value.problems[0].remedy
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgres_urls_use_psycopg(scheme: str) -> None:
    engine = build_engine(f"{scheme}://u@localhost/d")
    assert engine.url.drivername == "postgresql+psycopg"
    engine.dispose()
