"""Databases, migrated once and copied per use, and the application on top of them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pitstop_service.app import create_app
from pitstop_service.database import migrations
from pitstop_service.settings import Settings

from . import documents, postgres, server

BACKENDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Postgres]:
    binaries = postgres.find_binaries()
    if binaries is None:
        if os.environ.get("PITSTOP_REQUIRE_POSTGRES"):
            pytest.fail("PITSTOP_REQUIRE_POSTGRES is set, but no PostgreSQL binaries were found")
        pytest.skip("no PostgreSQL binaries (initdb, postgres) found")
    with postgres.running(binaries) as running:
        yield running


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


NewDatabase = Callable[[], str]


@pytest.fixture(scope="session")
def empty_database(
    backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NewDatabase:
    """Makes a database without a schema and returns its URL."""
    if backend == "sqlite":
        folder = tmp_path_factory.mktemp("empty")
        return lambda: f"sqlite:///{folder / uuid.uuid4().hex}.sqlite3"
    running: postgres.Postgres = request.getfixturevalue("postgres_server")
    return lambda: running.url(running.create())


@pytest.fixture(scope="session")
def new_database(
    backend: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NewDatabase:
    """Makes a database with the current schema and returns its URL."""
    if backend == "sqlite":
        folder = tmp_path_factory.mktemp("migrated")
        original = folder / "original.sqlite3"
        migrations.upgrade(f"sqlite:///{original}")

        def copy() -> str:
            target = folder / f"{uuid.uuid4().hex}.sqlite3"
            shutil.copy(original, target)
            return f"sqlite:///{target}"

        return copy
    running: postgres.Postgres = request.getfixturevalue("postgres_server")
    template = running.create()
    migrations.upgrade(running.url(template))
    return lambda: running.url(running.create(template))


@pytest.fixture(scope="session")
def service(new_database: NewDatabase) -> Iterator[server.Service]:
    """The application with the real simulator; shared, so tests compare counts and never assume an empty store."""
    url = new_database()
    with server.running(create_app(Settings(database_url=url)), url) as running:
        yield running


@pytest.fixture
def run_id(service: server.Service) -> str:
    """A registered run, one warm-up step."""
    return str(service.post("/v1/runs", documents.manifest())["id"])


@pytest.fixture(scope="session")
def sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For tests that do not depend on the database."""
    url = f"sqlite:///{tmp_path_factory.mktemp('one') / 'pitstop.sqlite3'}"
    migrations.upgrade(url)
    return url


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in os.environ if name.startswith("PITSTOP_") and name != "PITSTOP_REQUIRE_POSTGRES"
    ]:
        monkeypatch.delenv(name)
