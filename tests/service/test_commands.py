"""`pitstop serve` and `pitstop db` as a user runs them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue

import httpx
import pytest
import typer

from pitstop.cli.app import build_app, run
from pitstop.errors import InvalidInputError, MissingExtraError, PitstopError
from pitstop_service import commands, settings
from pitstop_service.app import create_app
from pitstop_service.settings import Settings

from . import documents, server
from .conftest import NewDatabase

PITSTOP = [sys.executable, "-c", "from pitstop.cli import main; main()"]


class Pitstop:
    """The command in this process: what a user would type, without the time to start an interpreter."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._capsys.readouterr()
        code = run(build_app, arguments)
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def pitstop(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pitstop:
    """The command, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Pitstop(capsys)


def test_serve_end_to_end(
    empty_database: NewDatabase, pitstop: Pitstop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused without schema, then migrated, served on a real port, asked, stopped; the data outlives the process."""
    url = empty_database()
    monkeypatch.setenv("PITSTOP_DATABASE_URL", url)
    code, out, err = pitstop("serve", "--port", "0")
    assert (code, out) == (2, "")
    assert "pitstop db upgrade" in err
    with _Server(tmp_path, "--migrate") as base:
        created = httpx.post(f"{base}/v1/predictions", json=documents.request(), trust_env=False, timeout=30)
        assert created.status_code == 201, created.text
    assert pitstop("db", "upgrade")[:2] == (0, "0001 (needed: 0001)\n")
    with server.running(create_app(Settings())) as again:
        assert again.client.get(created.headers["location"]).json() == created.json()


class _Server:
    """`pitstop serve` as a process of its own, on a port that the system chooses."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*PITSTOP, "serve", "--port", "0", *arguments], cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: Queue[str] = Queue()
        self._seen: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> str:
        self._reader.start()
        while True:
            try:
                line = self._lines.get(timeout=30)
            except Empty:
                line = ""
            self._seen.append(line)
            if match := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                return match[1]
            if not line:
                self._process.kill()
                self._process.wait()
                raise AssertionError("".join(self._seen))

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.stdout
        try:
            code = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(10)
        printed = self._process.stdout.read()
        self._process.stdout.close()
        assert self._process.stderr
        self._process.stderr.close()
        assert code in (0, 130, -signal.SIGINT), code
        assert printed == "", "stdout is for data"


def test_db_commands(pitstop: Pitstop, tmp_path: Path) -> None:
    none, there = "nothing (needed: 0001)\n", "0001 (needed: 0001)\n"
    assert pitstop("db", "current") == (0, none, "")
    assert not list(tmp_path.iterdir()), "asking creates no file"
    assert pitstop("db", "upgrade") == (0, there, "")
    assert (tmp_path / "pitstop.sqlite3").exists()
    assert pitstop("db", "current") == (0, there, "")
    assert pitstop("db", "downgrade", "base") == (0, none, "")
    code, out, err = pitstop("db", "upgrade", "9999")
    assert (code, out) == (2, "")
    assert "9999" in err
    assert "pitstop db current" in err


def test_default_url_is_that_of_the_settings() -> None:
    assert commands._DEFAULT_URL == settings.DEFAULT_DATABASE_URL


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_addresses(host: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr("uvicorn.run", lambda *_, host, **__: served.append(host))
    with pytest.raises(InvalidInputError, match="--insecure-allow-remote"):
        commands.serve_command(host=host, database_url=sqlite_url)
    assert served == []
    commands.serve_command(host=host, database_url=sqlite_url, insecure_allow_remote=True)
    assert served == [host]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_addresses_are_served(host: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr("uvicorn.run", lambda *_, host, **__: served.append(host))
    commands.serve_command(host=host, database_url=sqlite_url)
    assert served == [host]


def test_unreachable_database(tmp_path: Path) -> None:
    with pytest.raises(PitstopError, match="cannot be used"):
        commands.upgrade_command(database_url=f"sqlite:///{tmp_path}/none/pitstop.sqlite3")


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pitstop\[service\]'"):
        commands.serve_command()


def test_importing_the_commands_is_light() -> None:
    heavy = "{'fastapi', 'sqlalchemy', 'alembic', 'uvicorn', 'pydantic_settings'}"
    code = f"import sys, pitstop_service.commands; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_register_adds_the_commands() -> None:
    app = typer.Typer()
    commands.register(app)
    assert [command.name for command in app.registered_commands] == ["serve"]
    assert [group.name for group in app.registered_groups] == ["db"]
