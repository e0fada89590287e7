"""What all tests of clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from telemetry_servers import FakeServer, share_tls_context


@pytest.fixture
def cheap_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    share_tls_context(monkeypatch)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()
