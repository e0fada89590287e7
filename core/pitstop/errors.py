"""Errors that a user can cause. Each says what was wrong, with which value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

_SHOWN_VALUE_CHARS = 120


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One wrong field: its path, the value found there, what is wrong and the remedy."""

    field: str
    value: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} (got {self.value}). {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """The problem as JSON-ready strings."""
        return asdict(self)


class PitstopError(Exception):
    """Base of every error that Pitstop raises on purpose; ``title`` is a short constant phrase per class."""

    title = "Pitstop error"


class InvalidInputError(PitstopError):
    """Input that a user can correct: exit code 2 on the command line, 422 over HTTP."""

    title = "Invalid input"

    def __init__(self, message: str, problems: Iterable[FieldProblem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  - {p}" for p in self.problems)])

    @classmethod
    def from_validation(cls, what: str, error: ValidationError) -> InvalidInputError:
        """Turn pydantic's error about ``what`` (a file name, "request body") into ours."""
        problems = [
            FieldProblem(
                field=".".join(str(part) for part in item["loc"]) or "(top level)",
                value=show_value(item.get("input")),
                problem=_strip(item["msg"]),
                remedy=_remedy(dict(item)),
            )
            for item in error.errors(include_url=False)
        ]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return cls(f"{what}: {count} found", problems)


class InvalidScenarioError(InvalidInputError):
    """A scenario that contradicts itself or names something unknown."""

    title = "Invalid scenario"


class InvalidPlanError(InvalidInputError):
    """A plan that is unknown or cannot be carried out."""

    title = "Invalid plan"


class InvalidEvidenceError(InvalidInputError):
    """An evidence file or a telemetry batch that cannot be used as it is."""

    title = "Invalid evidence"


class UnsupportedScenarioError(PitstopError):
    """The evidence does not reach as far as this scenario; the message says what to measure."""

    title = "Scenario not supported by the evidence"


class MissingExtraError(PitstopError):
    """A command needs an optional part of the distribution that is not installed."""

    title = "Optional part not installed"


def show_value(value: Any) -> str:
    """A user's value as it should appear in a message: short, on one line, quoted if text."""
    if isinstance(value, dict):
        text = f"a mapping with keys {sorted(map(str, value))}"
    elif isinstance(value, list) and len(value) > 8:  # noqa: PLR2004 - longer lists say nothing in a message
        text = f"a list of {len(value)} items"
    else:
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[: _SHOWN_VALUE_CHARS - 1] + "…"


def _strip(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _remedy(item: dict[str, Any]) -> str:
    """Say what to do about one pydantic error, by its type."""
    kind, context = item["type"], item.get("ctx", {})
    match kind:
        case "missing":
            return "Add this field."
        case "extra_forbidden":
            return "Remove it or correct its spelling; unknown fields are never ignored."
        case "enum" | "literal_error":
            return f"Use one of: {context.get('expected', 'the documented values')}."
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            bound = context.get("gt", context.get("ge", context.get("lt", context.get("le"))))
            relation = kind.replace("_", " ").replace("than equal", "than or equal to")
            return f"Give a number {relation.replace('than', 'than', 1)} {bound}."
        case "finite_number":
            return "Give a finite number; NaN and infinity are not measurements."
        case "value_error":
            return "Correct the value as described."
        case _:
            return "Correct the value's type or form."
