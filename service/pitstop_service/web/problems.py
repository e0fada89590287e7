"""Errors over HTTP: every one is an RFC 9457 problem document.

``type`` is a stable URN per kind of problem, ``instance`` the path that was asked for. Where a user can correct
something, ``errors`` lists field, value, problem and remedy, as the command line does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_problem.error import Problem, StatusProblem
from fastapi_problem.handler import ExceptionHandler, new_exception_handler
from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pitstop.errors import FieldProblem, InvalidInputError, UnsupportedScenarioError

TYPE_TEMPLATE = "urn:pitstop:problem:{type}"
MEDIA_TYPE = "application/problem+json"
MAX_LISTED = 100
"""Most entries of ``errors`` and ``steps``: an answer must not be larger than the request that caused it."""

_log = logging.getLogger(__name__)


class NotFound(StatusProblem):
    """Nothing is stored under this identifier."""

    status = 404
    title = "Not found"

    def __init__(self, what: str, identifier: str) -> None:
        super().__init__(f"There is no {what} {identifier}. Check the identifier, or create one with POST.")


class StepConflict(StatusProblem):
    """Steps of a batch contradict what is stored, or each other."""

    status = 409
    title = "Step already recorded with different content"

    def __init__(self, steps: Sequence[int]) -> None:
        shown = list(steps[:MAX_LISTED])
        remedy = "Leave the step out, or send it exactly as it was recorded; a record is never overwritten."
        errors = [
            FieldProblem("steps.step", str(step), "recorded before with different content", remedy).as_dict()
            for step in shown
        ]
        number = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
        detail = f"{number} recorded before with different content; nothing of this batch was stored."
        super().__init__(detail, steps=shown, errors=errors)


class Unavailable(StatusProblem):
    """The request may succeed later."""

    status = 503
    title = "Temporarily unavailable"

    def __init__(self, detail: str, *, retry_after_s: int = 5) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_after_s)})


class InternalError(StatusProblem):
    """A defect of ours. The cause goes to the log, never to the client."""

    status = 500
    title = "Internal error"

    def __init__(self, _cause: str | None = None, **_: Any) -> None:
        super().__init__("The service failed on this request; its log has the cause.")


def input_problem(
    status: int, type_: str, title: str, detail: str, problems: Iterable[FieldProblem], **headers: str
) -> Problem:
    """A problem that the client can correct, with at most ``MAX_LISTED`` entries in ``errors``."""
    listed = list(problems)
    if len(listed) > MAX_LISTED:
        detail += f" (the first {MAX_LISTED} are listed)"
    errors = [problem.as_dict() for problem in listed[:MAX_LISTED]]
    renamed = {name.replace("_", "-"): value for name, value in headers.items()}
    return Problem(title, type_=type_, detail=detail, status=status, headers=renamed or None, errors=errors)


def _on_invalid_input(_: ExceptionHandler, __: Request, error: InvalidInputError) -> Problem:
    type_ = error.title.lower().replace(" ", "-")
    return input_problem(422, type_, error.title, error.message, error.problems)


def _on_unsupported(_: ExceptionHandler, __: Request, error: UnsupportedScenarioError) -> Problem:
    return Problem(error.title, type_="unsupported-scenario", detail=str(error), status=422, errors=[])


def _on_request_validation(
    handler: ExceptionHandler, request: Request, error: RequestValidationError
) -> Problem:
    lines = [_line(item) for item in error.errors()]
    rebuilt = ValidationError.from_exception_data("request", lines)
    return _on_invalid_input(handler, request, InvalidInputError.from_validation("request", rebuilt))


def _line(item: dict[str, Any]) -> InitErrorDetails:
    """FastAPI hands on pydantic's errors as plain data; our own wording starts from pydantic's exception."""
    loc = tuple(item["loc"])
    if loc[:1] == ("body",):
        loc = loc[1:]
    details = InitErrorDetails(type=item["type"], loc=loc, input=item.get("input"), ctx=item.get("ctx", {}))
    try:
        ValidationError.from_exception_data("request", [details])
    except (KeyError, TypeError):  # a type of error that pydantic itself does not know
        details["type"] = PydanticCustomError(item["type"], item["msg"].replace("{", "(").replace("}", ")"))
    return details


def _on_http_error(_: ExceptionHandler, request: Request, error: HTTPException) -> Problem:
    titles = {404: ("Not found", "not-found"), 405: ("Method not allowed", "method-not-allowed")}
    title, type_ = titles.get(error.status_code, ("Request refused", "request-refused"))
    detail = {
        404: f"There is nothing at {request.url.path}; see /openapi.json for what there is.",
        405: f"{request.method} is not possible at {request.url.path}; the Allow header has what is.",
    }.get(error.status_code, error.detail)
    headers = dict(error.headers) if error.headers else None
    return Problem(title, type_=type_, detail=detail, status=error.status_code, headers=headers)


def _on_database_error(_: ExceptionHandler, __: Request, error: Exception) -> Problem:
    _log.error("database unavailable", exc_info=error)
    return Unavailable("The database is unavailable or busy; nothing was stored. Send the request again.")


def _add_instance(
    content: dict[str, Any], request: Request, response: Response
) -> tuple[dict[str, Any], Response]:
    content["instance"] = request.url.path
    response.body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    return content, response


def install(app: FastAPI) -> ExceptionHandler:
    """Make every error of ``app`` a problem document; returns the handler for use outside the endpoints."""
    own: dict[type[Exception], Any] = {
        InvalidInputError: _on_invalid_input,
        UnsupportedScenarioError: _on_unsupported,
        OperationalError: _on_database_error,
        PoolTimeoutError: _on_database_error,
    }
    handler = new_exception_handler(
        unhandled_wrappers={"default": InternalError},
        handlers=dict(own),
        post_hooks=[_add_instance],
        documentation_uri_template=TYPE_TEMPLATE,
        http_exception_handler=_on_http_error,
        request_validation_handler=_on_request_validation,
    )
    for error in (*own, Problem, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error, handler)
    return handler
