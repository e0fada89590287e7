"""Refuse bodies that are too large before anything parses them, whether or not they announce their length.

Starlette's own limit answers in plain text; ours is a problem document like every other error.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi_problem.error import Problem
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pitstop.errors import FieldProblem

from .problems import input_problem


class BodyLimit:
    """ASGI middleware: at most ``limit`` bytes of body (413 beyond), counted as they arrive."""

    def __init__(self, app: ASGIApp, limit: int, respond: Callable[[Request, Exception], Response]) -> None:
        self.app = app
        self.limit = limit
        self.respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self.limit:
            response = self.respond(Request(scope), self._refusal(f"{announced[:20]} bytes"))
            await response(scope, receive, send)
            return
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self.limit:
                # Raised inside the endpoint's await, so the application's own handler answers.
                raise self._refusal(f"more than {self.limit} bytes")
            return message

        await self.app(scope, counted, send)

    def _refusal(self, value: str) -> Problem:
        remedy = "Send a smaller document; split a batch of steps, or leave rows out of the evidence."
        problem = FieldProblem("(body)", value, f"a body may have at most {self.limit} bytes", remedy)
        detail = "The request body is too large and was not read to its end."
        return input_problem(413, "body-too-large", "Body too large", detail, [problem], Connection="close")
