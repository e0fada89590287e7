"""Request bodies are strict JSON: UTF-8, no NaN or Infinity, no duplicate keys, nothing a database cannot hold.

Python's own parser accepts all of these silently; the last of two equal keys would win, and what a user meant by the
first would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pitstop.errors import FieldProblem, InvalidInputError, show_value

from .problems import input_problem

_JSON_REMEDY = "Send one JSON document (RFC 8259) in UTF-8."


def loads(text: bytes) -> Any:
    """Parse strict JSON.

    Raises:
        InvalidInputError: naming what is wrong, where, and the remedy.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("(body)", f"byte {error.start}", "not UTF-8", _JSON_REMEDY)
    try:
        value = json.loads(decoded, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        _refuse(
            "(body)", f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}", _JSON_REMEDY
        )
    except RecursionError:
        _refuse(
            "(body)",
            f"{len(text):,} bytes",
            "nested too deeply",
            "Send the document as the schema describes it.",
        )
    except ValueError as error:  # an integer of thousands of digits
        _refuse("(body)", "a number", str(error).split(";", maxsplit=1)[0], "Send a number of ordinary size.")
    if b"\\u" in text or b"\x00" in text:
        _check_text(value, "")
    return value


def _no_constant(name: str) -> NoReturn:
    _refuse(
        "(body)",
        name,
        "not JSON and not a measurement",
        "Leave the field out, or send null where it is optional.",
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        _refuse(
            show_value(twice).strip("'"),
            "two values",
            "key given twice in one object",
            "Give each field once.",
        )
    return result


def _check_text(value: Any, path: str) -> None:
    """Refuse text that is legal JSON and yet no text: NUL and lone surrogates fit neither UTF-8 nor PostgreSQL."""
    match value:
        case str():
            if "\x00" in value or any("\ud800" <= char <= "\udfff" for char in value):
                _refuse(
                    path or "(body)",
                    ascii(value)[:100],
                    "text with a NUL or half a surrogate pair",
                    "Send Unicode text without control zeros.",
                )
        case dict():
            for key, item in value.items():
                _check_text(key, f"{path} (name of a field)".strip())
                _check_text(item, f"{path}.{key}" if path else key)
        case list():
            for index, item in enumerate(value):
                _check_text(item, f"{path}.{index}" if path else str(index))


def _refuse(field: str, value: str, problem: str, remedy: str) -> NoReturn:
    raise InvalidInputError("request body: not strict JSON", [FieldProblem(field, value, problem, remedy)])


class _ParsedRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, body: bytes, document: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._read, self._document = body, document

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        return self._document


class StrictRoute(APIRoute):
    """A route that takes only ``application/json`` bodies and parses them strictly, off the event loop."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            if not has_body:
                return await handle(request)
            _check_media_type(request)
            try:
                body = await request.body()
            except ClientDisconnect:
                raise HTTPException(400, "The client went away before its body had arrived.") from None
            if not body:
                return await handle(request)
            document = await run_in_threadpool(loads, body)
            return await handle(_ParsedRequest(request, body, document))

        return strict


def _check_media_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        _unsupported(
            "Content-Encoding", encoding, "compressed bodies are not accepted", "Send the body as it is."
        )
    given = request.headers.get("content-type", "")
    parsed = Message()
    parsed["content-type"] = given
    if not given or parsed.get_content_type() != "application/json":
        _unsupported("Content-Type", given or "nothing", "not JSON", "Send Content-Type: application/json.")


def _unsupported(field: str, value: str, problem: str, remedy: str) -> NoReturn:
    raise input_problem(
        415,
        "unsupported-media-type",
        "Unsupported media type",
        f"{field}: {problem}",
        [FieldProblem(field, show_value(value), problem, remedy)],
        Accept="application/json",
    )
