"""Errors that a user can cause. Each says what was wrong, with which value, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

_SHOWN_VALUE_CHARS = 120
_SHOWN_MAPPING_ITEMS = 6
_SHOWN_LIST_ITEMS = 8
_FIELD_MESSAGE = re.compile(r"^([a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)*): (.+)$", re.DOTALL)
_SCALARS = (str, int, float, bool, type(None))


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


class FieldError(ValueError):
    """Raised inside a validator to name the field below the validated model, and the remedy.

    An empty ``field`` leaves the path to pydantic, as is right in a validator of a single field. Where no
    remedy fits better than "correct it", a ``ValueError("layout.pp: ...")`` in a model's validator will do.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem
        self.remedy = remedy


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
        problems = [_problem(dict(item)) for item in error.errors(include_url=False)]
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
    if isinstance(value, dict) and not _is_small(value):
        text = f"a mapping with keys {sorted(map(str, value))}"
    elif isinstance(value, list) and len(value) > _SHOWN_LIST_ITEMS:
        text = f"a list of {len(value)} items"
    else:
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[: _SHOWN_VALUE_CHARS - 1] + "…"


def use_one_of(value: object, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the known ones, the most similar first."""
    names, wanted = list(known), str(value).lower()
    near = [name for name in names if wanted and name.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return f"{hint}Use one of: {', '.join(names)}."


def _is_small(value: dict[Any, Any]) -> bool:
    return len(value) <= _SHOWN_MAPPING_ITEMS and all(isinstance(item, _SCALARS) for item in value.values())


def _problem(item: dict[str, Any]) -> FieldProblem:
    """One of pydantic's errors as ours, moved to the field that a model's validator blames."""
    loc, found, problem = [str(part) for part in item["loc"]], item.get("input"), _strip(item["msg"])
    remedy = _remedy(item)
    raised = item.get("ctx", {}).get("error")
    blamed = ""
    if isinstance(raised, FieldError):
        blamed, problem, remedy = raised.field, raised.problem, raised.remedy
    elif item["type"] == "value_error" and not isinstance(found, _SCALARS):
        # A validator of one field sees the field's value; one of a whole model names the field in its text.
        match = _FIELD_MESSAGE.match(problem)
        if match:
            blamed, problem = match[1], match[2]
            remedy = f"Correct {blamed}, or what it has to agree with."
    value = "nothing" if item["type"] == "missing" else show_value(found)
    if blamed:
        path = blamed.split(".")
        value, loc = _value_at(found, path), loc + path
    return FieldProblem(".".join(loc) or "(top level)", value, problem, remedy)


def _value_at(found: Any, path: list[str]) -> str:
    """The value that a user gave at a path, in a mapping or in a model made from one."""
    for part in path:
        if isinstance(found, Mapping):
            if part not in found:
                return "nothing, so the default"
            found = found[part]
        else:
            found = getattr(found, part, None)
    return show_value(found)


def _strip(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


_REMEDIES = {
    "missing": "Add this field.",
    "extra_forbidden": "Remove it or correct its spelling; unknown fields are never ignored.",
    "finite_number": "Give a finite number; NaN and infinity are not measurements.",
    "string_type": "Write it in quotes, so that it is read as text.",
    "int_type": "Give a whole number.",
    "int_parsing": "Give a whole number.",
    "int_parsing_size": "Give a smaller whole number.",
    "int_from_float": "Give a whole number.",
    "float_type": "Give a number.",
    "float_parsing": "Give a number.",
    "bool_type": "Give true or false.",
    "bool_parsing": "Give true or false.",
    "model_type": "Give a mapping of fields here.",
    "model_attributes_type": "Give a mapping of fields here.",
    "dict_type": "Give a mapping here.",
    "list_type": "Give a list here.",
    "invalid_key": "Give every field a name, in quotes if it looks like a number.",
    "value_error": "Correct the value as described.",
}


_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "of at most"),
}


def _remedy(item: dict[str, Any]) -> str:
    """Say what to do about one pydantic error, by its type."""
    kind, context = item["type"], item.get("ctx", {})
    if kind in _BOUNDS:
        key, relation = _BOUNDS[kind]
        return f"Give a number {relation} {context[key]}."
    match kind:
        case "literal_error" if item["loc"] and item["loc"][-1] == "schema_version":
            return f"This release reads version {context.get('expected')}: convert the document, or update."
        case "enum" | "literal_error":
            return f"Use one of: {context.get('expected', 'the documented values')}."
        case "string_pattern_mismatch":
            return f"Use only characters that match {context.get('pattern')}."
        case "string_too_long" | "string_too_short":
            bounds = {"min_length": "at least", "max_length": "at most"}
            key = next(key for key in bounds if key in context)
            return f"Give {bounds[key]} {context[key]} characters."
        case _:
            return _REMEDIES.get(kind, "Correct the value's type or form.")
