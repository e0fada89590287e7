"""The application on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from sqlalchemy import func, select

from pitstop_service.database.tables import TABLES

PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Service:
    """A running application and a client that talks to it."""

    app: FastAPI
    client: httpx.Client
    database_url: str

    def counts(self) -> dict[str, int]:
        """Rows per table."""
        with self.app.state.database.engine.connect() as connection:
            return {
                t.__tablename__: connection.scalar(select(func.count()).select_from(t)) or 0 for t in TABLES
            }

    def post(self, path: str, document: Any) -> Any:
        """POST something that must succeed."""
        answer = self.client.post(path, json=document)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def running(app: FastAPI, database_url: str = "") -> Iterator[Service]:
    """Serve ``app`` on a free loopback port."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", ws="none", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            yield Service(app, client, database_url)
    finally:
        server.should_exit = True
        thread.join(20)


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Check that an answer is a problem document and return it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    document: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail", "instance"} <= document.keys()
    assert document["type"].startswith("urn:pitstop:problem:")
    assert document["status"] == status
    assert document["instance"] == answer.request.url.path
    for item in document.get("errors", []):
        assert item.keys() == {"field", "value", "problem", "remedy"}
        assert all(isinstance(text, str) and text for text in item.values()), item
    return document
