"""HTTP to the service: one request, one answer or one of two errors; a limit on time and on size for each.

What to do about an error is decided by who asked: ``TemporaryError`` is worth sending the same again,
``RefusedError`` is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from pitstop import __version__
from pitstop.errors import FieldProblem, InvalidInputError, PitstopError, show_value

DEFAULT_TIMEOUT_S: Final = 10.0
LONGEST_RETRY_AFTER_S: Final = 600.0
_LARGEST_ANSWER = 1024**2
_SHORTEST_TIMEOUT_S = 0.05
_TEMPORARY = (408, 425, 429)


class TemporaryError(PitstopError):
    """No answer, or one that makes no sense, or the service's word that it may work later."""

    title = "Service not available"

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(PitstopError):
    """The service has answered, and will answer the same again."""

    title = "Refused by the service"

    def __init__(self, status: int, document: Mapping[str, Any] | None) -> None:
        self.status, self.document = status, document
        said = document or {}
        text = said.get("detail") or said.get("title") or "without a reason that can be read"
        super().__init__(f"HTTP {status}: {show_value(text)}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A success, or 304; ``document`` is None only without a body."""

    status: int
    document: dict[str, Any] | None
    etag: str | None


def checked_url(url: str) -> str:
    """The service's address without a trailing slash.

    Raises:
        InvalidInputError: not an address of a web service.
    """
    try:
        parsed = urlsplit(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
        httpx.URL(url)
    except (ValueError, AttributeError, TypeError, httpx.InvalidURL):
        usable = False
    if not usable:
        problem = FieldProblem(
            "url", show_value(url), "not the address of a service", "Give one like http://host:8000."
        )
        raise InvalidInputError("telemetry: unusable address", [problem])
    return url.rstrip("/")


def idempotency_key(namespace: uuid.UUID, *content: bytes) -> uuid.UUID:
    """The key of a request: the same for the same content of the same sender, also after a restart."""
    total = hashlib.sha256()
    for part in content:
        total.update(b"%d:" % len(part))
        total.update(part)
    return uuid.uuid5(namespace, total.hexdigest())


class Connection:
    """A keep-alive connection to one service. For one thread at a time."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        remaining: Callable[[], float] = lambda: math.inf,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``remaining`` tells how many seconds are left in all; ``transport`` replaces the network in tests."""
        self.name = str(httpx.URL(url).copy_with(username=None, password=None))
        self._timeout_s, self._remaining = timeout_s, remaining
        headers = {
            "Accept": "application/json, application/problem+json",
            "Accept-Encoding": "identity",  # a compressed answer could be larger than it looks
            "User-Agent": f"pitstop/{__version__}",
        }
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(base_url=url, headers=headers, transport=transport)

    def post(self, path: str, body: bytes, key: uuid.UUID) -> dict[str, Any]:
        """POST a JSON document and return the JSON object of the answer.

        Raises:
            TemporaryError, RefusedError: see there.
        """
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(key)}
        return self._send("POST", path, content=body, headers=headers).document or {}

    def get(self, path: str, params: Mapping[str, str], etag: str | None = None) -> Answer:
        """GET a JSON object; 304 if it is the one that ``etag`` came with. Raises as ``post``."""
        return self._send("GET", path, params=params, headers={"If-None-Match": etag} if etag else {})

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _send(self, method: str, path: str, **content: Any) -> Answer:
        seconds = max(min(self._timeout_s, self._remaining()), _SHORTEST_TIMEOUT_S)
        deadline = time.monotonic() + seconds
        try:
            with self._client.stream(method, path, timeout=seconds, **content) as response:
                body = _read(response, deadline)
        except TemporaryError:
            raise
        except Exception as error:  # besides httpx's own: of TLS, of name look-up, of a proxy's settings
            text = str(error) or type(error).__name__
            raise TemporaryError(f"{method} {self.name}{path}: {text}") from error
        return _judge(f"{method} {self.name}{path}", response, body)


def _read(response: httpx.Response, deadline: float) -> bytes:
    """The body. httpx limits each read; a server that sends a byte now and then must not hold us for ever."""
    body = b""
    for part in response.iter_raw():
        body += part
        if time.monotonic() > deadline:
            raise TemporaryError(f"{response.url}: the answer took too long")
        if len(body) > _LARGEST_ANSWER:
            raise TemporaryError(f"{response.url}: the answer is larger than {_LARGEST_ANSWER} bytes")
    return body


def _judge(what: str, response: httpx.Response, body: bytes) -> Answer:
    status = response.status_code
    try:
        parsed = json.loads(body)
        document: dict[str, Any] | None = parsed if isinstance(parsed, dict) else None
    except (ValueError, RecursionError):
        document = None
    if status in _TEMPORARY or status >= 500:
        raise TemporaryError(f"{what}: HTTP {status}", _retry_after_s(response))
    if status != httpx.codes.NOT_MODIFIED and not response.is_success:
        raise RefusedError(status, document)
    if response.is_success and document is None:
        raise TemporaryError(f"{what}: HTTP {status} with something that is not a JSON object")
    return Answer(status, document, response.headers.get("etag"))


def _retry_after_s(response: httpx.Response) -> float:
    """What Retry-After asks for, in seconds; it may be a number or a date."""
    given = response.headers.get("retry-after", "").strip()
    if given.isascii() and given.isdigit():
        seconds = float(given[:9])
    else:
        try:
            seconds = (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)
