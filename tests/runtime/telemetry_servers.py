"""What the telemetry tests talk to: the real service on a socket, and a server that answers as it is told."""

from __future__ import annotations

import functools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from sqlalchemy import select

from pitstop.telemetry import StepRecord
from pitstop_service.app import create_app
from pitstop_service.database import migrations
from pitstop_service.runs.models import StoredRun, StoredStep
from pitstop_service.settings import Settings


def wait_until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for something that must happen; the limit is for a broken test only."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what or condition}"
        time.sleep(0.005)


_tls_context = functools.cache(ssl.create_default_context)


def share_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the certificates of all authorities takes longer than most tests."""
    monkeypatch.setattr(ssl, "create_default_context", _tls_context)


@contextmanager
def nobody() -> Iterator[str]:
    """An address that refuses connections, and that no other server gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@dataclass
class RealService:
    """The application; can be down, and come up with the same database or another."""

    database: Path
    port: int = 0
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None
    app: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.app = create_app(Settings(database_url=f"sqlite:///{self.database}"))
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="critical", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server and self._server.started, "service started")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(20)
            self._server = None

    def _all(self, query: Any) -> list[Any]:
        with self.app.state.database.engine.connect() as connection:
            return list(connection.execute(query))

    def runs(self, name: str = "run") -> list[str]:
        """Ids of the runs of one manifest."""
        rows = self._all(select(StoredRun.id, StoredRun.manifest).order_by(StoredRun.created_at))
        return [row.id for row in rows if row.manifest["provenance"]["who"] == name]

    def scenario_digest(self, run_id: str) -> str:
        return str(self._all(select(StoredRun.scenario_digest).where(StoredRun.id == run_id))[0][0])

    def steps(self, run_id: str) -> dict[int, StepRecord]:
        rows = self._all(
            select(StoredStep.record).where(StoredStep.run_id == run_id).order_by(StoredStep.step)
        )
        records = [StepRecord.model_validate(row.record) for row in rows]
        assert len({record.step for record in records}) == len(records)
        return {record.step: record for record in records}


@contextmanager
def real_service(folder: Path) -> Iterator[RealService]:
    """The application with an empty SQLite database, started."""
    database = folder / "pitstop.sqlite3"
    migrations.upgrade(f"sqlite:///{database}")
    service = RealService(database)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@dataclass(frozen=True)
class Request:
    """What arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in json.loads(self.body)["steps"]]


@dataclass(frozen=True)
class Reply:
    """What goes back; ``dribble`` sends the body byte by byte, until the client is gone."""

    status: int = 200
    body: bytes | dict[str, Any] = b""
    headers: dict[str, str] = field(default_factory=dict)
    dribble: bool = False


Answer = Callable[[Request], Reply | None]
"""None closes the connection without an answer."""

RUN_ID = "11111111-2222-4333-8444-555555555555"


def well_behaved(request: Request) -> Reply:
    """As the service answers when all is well."""
    if request.path == "/v1/runs":
        return Reply(201, {"id": RUN_ID, "created_at": "2026-01-15T08:30:00Z"})
    return Reply(200, {"stored": len(request.steps), "duplicates": 0})


class FakeServer:
    """Answers with ``answer`` and remembers what arrived."""

    def __init__(self) -> None:
        self.answer: Answer = well_behaved
        self.requests: list[Request] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, body)
                outer.requests.append(request)
                reply = outer.answer(request)
                if reply is None:
                    self.close_connection = True
                    return
                self._send(reply)

            do_GET = do_POST = _serve  # noqa: N815

            def _send(self, reply: Reply) -> None:
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                kind = "text/html" if isinstance(reply.body, bytes) else "application/json"
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Type": kind, **reply.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    for part in (bytes([byte]) for byte in content) if reply.dribble else [content]:
                        self.wfile.write(part)
                        if reply.dribble:
                            time.sleep(0.02)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def batches(self) -> list[Request]:
        """Requests with steps."""
        return [request for request in self.requests if request.path.endswith("/steps")]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def script(*answers: Reply | Answer | None) -> Answer:
    """One answer after the other, then as the well-behaved service does."""
    left = list(answers)

    def answer(request: Request) -> Reply | None:
        if not left:
            return well_behaved(request)
        following = left.pop(0)
        return following(request) if callable(following) else following

    return answer
