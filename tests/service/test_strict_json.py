"""The strict parser agrees with the standard one on everything that is strict JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pitstop.errors import InvalidInputError
from pitstop_service.web.strict_json import loads

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
)
_JSON = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner), max_leaves=20)


@settings(deadline=None)
@given(_JSON, st.booleans())
def test_agrees_with_the_standard_parser(value: object, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped).encode()
    assert loads(text) == json.loads(text)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_never_fails_otherwise(text: bytes) -> None:
    with contextlib.suppress(InvalidInputError):
        loads(text)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b'{"a": {"b": 1, "b": 1}}', "b"),
        (b'{"a": ["x", "\\u0000"]}', "a.1"),
        (b'{"a": {"b": "\\ud800"}}', "a.b"),
        (b'[{"a": NaN}]', "(body)"),
        (b"1 2", "(body)"),
        (b"", "(body)"),
    ],
)
def test_names_the_place(text: bytes, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        loads(text)
    assert caught.value.problems[0].field == field
