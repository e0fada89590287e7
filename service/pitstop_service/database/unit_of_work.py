"""One unit of work per request: endpoints and services use a session, and only this module commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from .engine import build_engine, reading, writing


@dataclass(frozen=True, slots=True)
class Database:
    """The application's engine, for reading and for writing."""

    engine: Engine
    reader: Engine
    writer: Engine

    @classmethod
    def open(cls, url: str) -> Database:
        """Make the engines; no connection is opened yet."""
        engine = build_engine(url)
        return cls(engine, reading(engine), writing(engine))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def get_database(request: Request) -> Database:
    """The database of the running application."""
    database: Database = request.app.state.database
    return database


def _write(database: Annotated[Database, Depends(get_database)]) -> Iterator[Session]:
    with Session(database.writer, expire_on_commit=False) as session, session.begin():
        yield session


def _read(database: Annotated[Database, Depends(get_database)]) -> Iterator[Session]:
    with Session(database.reader) as session:
        yield session


# Scope "function": the commit comes before the answer is sent, so that a failed commit is never announced as success.
WriteSession = Annotated[Session, Depends(_write, scope="function")]
ReadSession = Annotated[Session, Depends(_read, scope="function")]
