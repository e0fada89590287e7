"""Bad documents: each message names the field, the value and the remedy."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from pitstop.errors import FieldProblem, InvalidInputError, InvalidScenarioError
from pitstop.loading import MAX_DOCUMENT_BYTES, load_scenario, parse_document, parse_scenario, validate
from pitstop.scenario import Scenario

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "name": "s",
    "hardware": {"gpu": "h200", "gpus_per_node": 8},
    "model": "qwen3-4b",
}


def _problems(document: Any) -> tuple[FieldProblem, ...]:
    with pytest.raises(InvalidScenarioError) as caught:
        parse_scenario(json.dumps(document).encode(), "s.json")
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return caught.value.problems


def test_the_good_document_is_good() -> None:
    assert parse_scenario(json.dumps(GOOD).encode(), "s.json").world_size == 8


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"),
    [
        ({"layout": {"tp": 3}}, "layout.tp", "3", "product divides 8"),
        ({"layout": {"pp": 8}}, "layout.pp", "8", "pp that divides the layers"),
        ({"layout": {"tp": 2, "dp": 3}}, "layout.dp", "3", "Use 4"),
        ({"layout": {"ep": 2}}, "layout.ep", "2", "ep = 1"),
        ({"layout": {"ep": 3}, "model": "qwen3-30b-a3b"}, "layout.ep", "3", "divides 8"),
        ({"layout": {"etp": 3}}, "layout.etp", "3", "divides 8"),
        ({"layout": {"order": "tp-tp"}}, "layout.order", "tp-tp", "Megatron's own order"),
        ({"layout": {"tp": 0}}, "layout.tp", "0", "at least 1"),
        ({"layout": {"tp": -2}}, "layout.tp", "-2", "at least 1"),
        ({"layout": {"tp": 1.5}}, "layout.tp", "1.5", "whole number"),
        ({"layout": {"tp": True}}, "layout.tp", "True", "Give a number"),
        ({"layout": {"tp": "many"}}, "layout.tp", "many", "whole number"),
        ({"hardware": {"gpu": "h2000", "gpus_per_node": 8}}, "hardware.gpu", "h2000", "Did you mean h200?"),
        ({"hardware": {"gpu": "h200", "gpus_per_node": -8}}, "hardware.gpus_per_node", "-8", "at least 1"),
        ({"hardware": {"gpu": "h200", "gpus_per_node": 10**30}}, "hardware.gpus_per_node", "1000", "at most 72"),
        ({"hardware": {"gpu": "h200"}}, "hardware.gpus_per_node", "nothing", "Add this field"),
        ({"hardware": {"gpu": "h200", "gpus_per_node": 72, "nodes": 10**6}}, "hardware.nodes", "1000000", "fewer nodes"),
        ({"model": "qwen3-4x"}, "model", "qwen3-4x", "Did you mean qwen3-4b?"),
        ({"trainer": {"cooldown_s": -1}}, "trainer.cooldown_s", "-1", "at least 0"),
        ({"trainer": {"cooldown_s": 1e9}}, "trainer.cooldown_s", "1000000000.0", "at most 86400"),
        ({"trainer": {"cooldown_s": float("nan")}}, "trainer.cooldown_s", "nan", "number"),
        ({"trainer": {"rollout_s": float("inf")}}, "trainer.rollout_s", "inf", "number"),
        ({"trainer": {"saved_bytes_per_rank": 2**60}}, "trainer.saved_bytes_per_rank", str(2**60), "at most"),
        ({"trainer": {"group_creation": "eagre"}}, "trainer.group_creation", "eagre", "'lazy' or 'eager'"),
        ({"engine": {"mem_fraction_static": 1.2}}, "engine.mem_fraction_static", "1.2", "less than 1"),
        ({"engine": {"tp": 16}}, "engine.tp", "16", "at most 8"),
        ({"schema_version": 2}, "schema_version", "2", "version 1"),
        ({"schema_version": "one"}, "schema_version", "one", "version 1"),
        ({"layuot": {"tp": 2}}, "layuot", "'tp': 2", "correct its spelling"),
        ({"layout": {"tpp": 2}}, "layout.tpp", "2", "correct its spelling"),
        ({"layout": [1]}, "layout", "[1]", "mapping"),
        ({"name": ""}, "name", "''", "at least 1 characters"),
        ({"name": "../../etc"}, "name", "../../etc", "characters that match"),
        ({"versions": {"nccl": 2.3}}, "versions.nccl", "2.3", "quotes"),
    ],
)  # fmt: skip
def test_field_value_and_remedy(changes: dict[str, Any], field: str, value: str, remedy: str) -> None:
    found = {p.field: p for p in _problems({**GOOD, **changes})}
    assert field in found, f"blamed {list(found)}"
    assert value in found[field].value
    assert remedy in found[field].remedy


def test_all_problems_are_listed_at_once() -> None:
    fields = {p.field for p in _problems({**GOOD, "layout": {"tp": 0}, "engine": {"tp": 0}, "x": 1})}
    assert fields == {"layout.tp", "engine.tp", "x"}


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (b"[1, 2]", "(top level)", "a mapping of fields is needed"),
        (b"just text", "(top level)", "a mapping of fields is needed"),
        (b"", "(top level)", "a mapping of fields is needed"),
        (b"name: a\nname: b\n", "line 2", "duplicate key 'name'"),
        (b'{"name": 1, "name": 2}', "(document)", "duplicate key 'name'"),
        (b"a: &x [1]\nb: *x\n", "line 2", "aliases are not accepted"),
        (b"name: [\n", "line 2", "expected"),
        (b"name: \xff\xfe\xfa", "(document)", ""),
        (b"a: !!python/object/apply:os.system [ls]\n", "line 1", "could not determine a constructor"),
        (b"[" * 10_000, "line 1", "nested more than"),
        (b'{"a":' * 100_000, "line 1", "nested more than"),
        (b"name: a\x00b", "", ""),
    ],
)
def test_unreadable_documents(text: bytes, where: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_document(text, "s.yaml")
    (problem,) = caught.value.problems
    assert where in problem.field
    assert words in problem.problem
    assert problem.value
    assert problem.remedy
    assert str(caught.value).startswith("s.yaml: ")


def test_billion_laughs_are_refused_before_they_grow() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(InvalidInputError, match="aliases are not accepted"):
        parse_document("\n".join(lines).encode(), "bomb.yaml")


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.write(b"name: a\n")
        file.truncate(100_000_000)  # sparse: 100 MB that take no disk
    tracemalloc.start()
    try:
        with pytest.raises(InvalidScenarioError) as caught:
            load_scenario(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_DOCUMENT_BYTES
    (problem,) = caught.value.problems
    assert problem.field == "(document)"
    assert f"at most {MAX_DOCUMENT_BYTES:,} bytes" in problem.problem
    assert "--evidence" in problem.remedy


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_scenario(tmp_path / name)


class _Inner(BaseModel):
    pp: int = 1


class _Outer(BaseModel):
    layout: _Inner = _Inner()

    @model_validator(mode="after")
    def _check(self) -> _Outer:
        if self.layout.pp > 1:
            raise ValueError("layout.pp: too many stages")
        return self


@pytest.mark.parametrize(
    ("document", "prefix"), [({"layout": {"pp": 3}}, ""), ({"o": {"layout": {"pp": 3}}}, "o.")]
)
def test_a_model_validators_message_names_its_field(document: dict[str, Any], prefix: str) -> None:
    class Holder(BaseModel):
        o: _Outer

    with pytest.raises(InvalidInputError) as caught:
        validate(Holder if prefix else _Outer, document, "request body")
    (problem,) = caught.value.problems
    assert problem.field == f"{prefix}layout.pp"
    assert problem.value == "3"
    assert problem.problem == "too many stages"
    assert "layout.pp" in problem.remedy


def test_json_and_yaml_give_the_same_scenario() -> None:
    yaml_text = b"name: s\nhardware: {gpu: h200, gpus_per_node: 8}\nmodel: qwen3-4b\n"
    assert parse_scenario(yaml_text, "a") == parse_scenario(json.dumps(GOOD, indent="\t").encode(), "b")
    assert isinstance(parse_scenario(yaml_text, "a"), Scenario)
