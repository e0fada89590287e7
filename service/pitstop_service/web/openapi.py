"""The OpenAPI document: FastAPI's own, with our problem document as the schema of every error."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from .problems import MEDIA_TYPE

_REF = "#/components/schemas/"


class FieldProblemOut(BaseModel):
    """One wrong field."""

    field: str = Field(description="path of the field, joined by dots; a part in parentheses is not a field")
    value: str = Field(description="the value found there, shortened")
    problem: str = Field(description="what is wrong with it")
    remedy: str = Field(description="what to do about it")


class ProblemDetails(BaseModel):
    """An error as RFC 9457 describes it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "urn:pitstop:problem:invalid-input",
                "title": "Invalid input",
                "status": 422,
                "detail": "request: 1 problem found",
                "instance": "/v1/predictions",
                "errors": [
                    {
                        "field": "draws",
                        "value": "10",
                        "problem": "Input should be greater than or equal to 50",
                        "remedy": "Give a number of at least 50.",
                    }
                ],
            }
        }
    )

    type: str = Field(description="stable URN of this kind of problem")
    title: str = Field(description="the kind of problem in words; the same for every occurrence")
    status: int = Field(description="HTTP status code")
    detail: str = Field(description="what happened this time")
    instance: str = Field(description="path of the request")
    errors: list[FieldProblemOut] | None = Field(
        default=None, description="wrong fields, at most 100, where there are any"
    )
    steps: list[int] | None = Field(
        default=None, description="conflicting step numbers, at most 100 (409 only)"
    )


def problem_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Entries for a route's ``responses``: a problem document for each of the status codes."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"{_REF}ProblemDetails"}}}
    return {code: {"description": HTTPStatus(code).phrase, "content": content} for code in codes}


def install(app: FastAPI) -> None:
    """Add the problem document's schemas, which no endpoint returns, to the OpenAPI document of ``app``."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schema = ProblemDetails.model_json_schema(ref_template=_REF + "{model}")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(schema.pop("$defs"))
        schemas["ProblemDetails"] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
