"""Read documents (YAML or JSON) into the vocabulary's models, with limits and messages a user can act on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from pitstop.errors import FieldProblem, InvalidInputError, InvalidScenarioError, show_value
from pitstop.scenario import Scenario

MAX_DOCUMENT_BYTES = 1_000_000

M = TypeVar("M", bound=BaseModel)

MAX_DEPTH = 32

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]
    """Safe YAML that refuses duplicate keys, which YAML's rules forbid and PyYAML lets pass."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise _yaml_error(f"duplicate key {key!r}", key_node.start_mark)
                seen.add(key)
        result: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return result


def _yaml_error(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _refuse_bombs(text: bytes) -> None:
    """Refuse aliases (a small file must not grow into a large one) and deep nesting before anything is built.

    The events are read first because the C loader composes nodes where no method of a subclass can look on.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.events.AliasEvent):
            raise _yaml_error("aliases are not accepted", event.start_mark)
        if isinstance(event, yaml.events.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _yaml_error(f"nested more than {MAX_DEPTH} levels deep", event.start_mark)
        elif isinstance(event, yaml.events.CollectionEndEvent):
            depth -= 1


def _line(text: bytes, number: int) -> str:
    """A line of the document as it should appear in a message."""
    lines = text.decode(errors="replace").splitlines()
    return show_value(lines[number].strip()) if number < len(lines) else "the document's end"


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _yaml_error(f"duplicate key {twice!r}", None)
    return result


def _parsed(text: bytes) -> Any:
    """The document as plain data; JSON is tried first, since YAML refuses JSON that is indented with tabs."""
    if text.lstrip()[:1] == b"{":
        try:
            return json.loads(text, object_pairs_hook=_unique_pairs)
        except (json.JSONDecodeError, RecursionError):
            pass  # perhaps YAML in flow style; if not, YAML's parser says where it is wrong
    _refuse_bombs(text)
    return yaml.load(text, Loader=_StrictLoader)


def parse_document(text: bytes, what: str) -> dict[str, Any]:
    """Parse YAML or JSON into a mapping.

    Raises:
        InvalidInputError: too large, not YAML, or not a mapping.
    """
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidInputError(
            f"{what}: too large",
            [
                FieldProblem(
                    "(document)",
                    f"{len(text):,} bytes",
                    f"a document may have at most {MAX_DOCUMENT_BYTES:,} bytes",
                    "Give one scenario per file; measured rows belong in an evidence file (--evidence).",
                )
            ],
        )
    try:
        parsed = _parsed(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "(document)" if line is None else f"line {line + 1}"
        value = "unreadable text" if line is None else _line(text, line)
        problem = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInputError(
            f"{what}: not valid YAML or JSON",
            [FieldProblem(where, value, str(problem), "Correct the file's syntax.")],
        ) from None
    if not isinstance(parsed, dict):
        problem = "a mapping of fields is needed"
        raise InvalidInputError(
            f"{what}: not a mapping",
            [FieldProblem("(top level)", show_value(parsed), problem, "Start from an example.")],
        )
    return parsed


def read_limited(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a file of at most ``limit`` bytes (one more is read, so that the caller's size check fires).

    Raises:
        InvalidInputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise InvalidInputError(
            f"{path}: cannot be read",
            [FieldProblem("(file)", str(path), error.strerror or str(error), "Give a readable file's path.")],
        ) from None


def load_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML or JSON file.

    Raises:
        InvalidScenarioError: with every wrong field, its value and the remedy.
    """
    return parse_scenario(read_limited(path), str(path))


def parse_scenario(text: bytes, what: str) -> Scenario:
    """Parse a scenario from YAML or JSON text; raises as ``load_scenario``."""
    try:
        return validate(Scenario, parse_document(text, what), what)
    except InvalidScenarioError:
        raise
    except InvalidInputError as error:
        raise InvalidScenarioError(error.message, error.problems) from None


def validate(model: type[M], value: Any, what: str) -> M:
    """Validate parsed data into ``model``; raises InvalidInputError naming field, value and remedy."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InvalidInputError.from_validation(what, error) from None


def digest(document: BaseModel) -> str:
    """SHA-256 (hex) of a document's canonical JSON: equal documents have equal digests."""
    text = json.dumps(document.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
