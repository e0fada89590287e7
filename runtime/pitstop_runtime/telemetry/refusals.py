"""Which records of a refused batch are at fault: as the service says, or by halving the batch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .transport import RefusedError

_INDEX = re.compile(r"^steps\.(\d{1,6})(?:\.|$)")
_CONTENT = (400, 409, 422)
_TOO_LARGE = 413


@dataclass(frozen=True, slots=True)
class Verdict:
    """Records at fault, with the reasons, and what is left to send, in batches."""

    refused: list[tuple[bytes, str]]
    again: list[list[bytes]]


def about_records(refusal: RefusedError) -> bool:
    """Whether what was sent is at fault, and not the token, the address or a proxy's mood.

    A proxy may refuse a large body in its own words; any other judgement on content needs the service's JSON.
    """
    if refusal.status == _TOO_LARGE:
        return True
    return refusal.status in _CONTENT and refusal.document is not None


def judge(batch: Sequence[bytes], refusal: RefusedError) -> Verdict:
    """Tell the records at fault from the others; the parts are always smaller than the batch."""
    reasons = _by_index(batch, refusal) or _by_step(batch, refusal)
    if not reasons and len(batch) == 1:
        reasons = {0: str(refusal)}
    if reasons:
        rest = [record for index, record in enumerate(batch) if index not in reasons]
        return Verdict([(batch[index], reasons[index]) for index in sorted(reasons)], [rest] if rest else [])
    middle = len(batch) // 2
    return Verdict([], [list(batch[:middle]), list(batch[middle:])])


def _by_index(batch: Sequence[bytes], refusal: RefusedError) -> dict[int, str]:
    """Records that the field names of the problem document point at, as ``steps.3.phases.sleep`` does."""
    reasons: dict[int, str] = {}
    errors = (refusal.document or {}).get("errors")
    for item in errors if isinstance(errors, list) else []:
        field = item.get("field") if isinstance(item, dict) else None
        match = _INDEX.match(field) if isinstance(field, str) else None
        if match and int(match[1]) < len(batch):
            index = int(match[1])
            reason = f"{field}: {item.get('problem', 'refused')} (got {item.get('value', 'a value')})"
            reasons[index] = f"{reasons[index]}; {reason}" if index in reasons else reason
    return reasons


def _by_step(batch: Sequence[bytes], refusal: RefusedError) -> dict[int, str]:
    """Records whose step numbers a conflict names; of several with one number the first gets another chance."""
    named = (refusal.document or {}).get("steps")
    if refusal.status != 409 or not isinstance(named, list):
        return {}
    at: dict[Any, list[int]] = {}
    for index, record in enumerate(batch):
        at.setdefault(json.loads(record)["step"], []).append(index)
    reasons: dict[int, str] = {}
    for number in named:
        indices = at.get(number, []) if isinstance(number, int) else []
        for index in indices[1:] or indices:
            reasons[index] = str(refusal)
    return reasons
