"""Reading documents: limits, and errors that name field, value and remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from pydantic import model_validator

from pitstop.errors import FieldProblem, InvalidInputError, InvalidScenarioError, show_value
from pitstop.loading import (
    MAX_DOCUMENT_BYTES,
    digest,
    load_scenario,
    parse_document,
    parse_scenario,
    validate,
)
from pitstop.scenario import Layout, StrictModel
from pitstop.telemetry import RunManifest

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "name": "eight-gpus",
    "hardware": {"gpu": "h200", "gpus_per_node": 8},
    "layout": {"tp": 2, "pp": 2},
    "model": "qwen3-30b-a3b",
}


def changed(path: str, value: object) -> bytes:
    """GOOD with one field changed (``...``: removed), as YAML."""
    document = json.loads(json.dumps(GOOD))
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return yaml.safe_dump(document).encode()


def the_problem(text: bytes) -> FieldProblem:
    with pytest.raises(InvalidScenarioError) as caught:
        parse_scenario(text, "scenario.yaml")
    assert caught.value.message.startswith("scenario.yaml: ")
    (problem,) = caught.value.problems
    return problem


BAD = [
    # path, value given, field named, value shown, part of the problem or remedy
    ("hardware.gpu", "h2000", "hardware.gpu", "'h2000'", "Did you mean h200?"),
    ("hardware.gpu", 200, "hardware.gpu", "200", "in quotes"),
    ("hardware.gpus_per_node", -8, "hardware.gpus_per_node", "-8", "at least 1"),
    ("hardware.gpus_per_node", 8.5, "hardware.gpus_per_node", "8.5", "whole number"),
    ("hardware.gpus_per_node", True, "hardware.gpus_per_node", "True", "Give a number"),
    ("hardware.gpus_per_node", "many", "hardware.gpus_per_node", "'many'", "whole number"),
    ("hardware.gpus_per_node", ..., "hardware.gpus_per_node", "nothing", "Add this field"),
    ("hardware.nodes", 0, "hardware.nodes", "0", "at least 1"),
    ("hardware.nodes", 10**12, "hardware.nodes", "1000000000000", "at most 1048576"),
    ("hardware.nodes", 1_048_576, "hardware.nodes", "1048576", "fewer nodes"),
    ("hardware.nodes", math.nan, "hardware.nodes", "nan", "finite"),
    ("hardware.nodes", math.inf, "hardware.nodes", "inf", "finite"),
    ("hardware.ranks_per_gpu", 17, "hardware.ranks_per_gpu", "17", "at most 16"),
    ("hardware.link", "string", "hardware.link", "'string'", "'nvswitch'"),
    ("hardware", "h200", "hardware", "'h200'", "mapping of fields"),
    ("layout.tp", 3, "layout.tp", "3", "not divisible by tp x pp x cp = 3 x 2 x 1 = 6"),
    ("layout.pp", 3, "layout.pp", "3", "not divisible by tp x pp x cp"),
    ("layout.cp", 3, "layout.cp", "3", "not divisible by tp x pp x cp"),
    ("layout.etp", 3, "layout.etp", "3", "not divisible by etp x ep x pp"),
    ("layout.ep", 3, "layout.ep", "3", "not divisible by tp x ep x pp"),
    ("layout.dp", 4, "layout.dp", "4", "Use 2, or leave it out"),
    ("layout.dist_opt_instances", 3, "layout.dist_opt_instances", "3", "common divisor of 2 and 2"),
    ("layout.first_stage_layers", 48, "layout.pp", "2", "set first_stage_layers and last_stage_layers"),
    ("layout.order", "tp-tp", "layout.order", "'tp-tp'", "at most once"),
    ("layout.order", "tp-xp", "layout.order", "'tp-xp'", "Megatron's own order"),
    ("layout.zp", 2, "layout.zp", "2", "spelling"),
    ("model", "qwen3-30b", "model", "'qwen3-30b'", "Did you mean qwen3-30b-a3b?"),
    ("model", ..., "model", "nothing", "Add this field"),
    ("trainer.cooldown_s", -2, "trainer.cooldown_s", "-2", "at least 0"),
    ("trainer.cooldown_s", math.nan, "trainer.cooldown_s", "nan", "finite"),
    ("trainer.rollout_s", 1e9, "trainer.rollout_s", "1000000000.0", "at most 86400"),
    ("trainer.saved_bytes_per_rank", -1, "trainer.saved_bytes_per_rank", "-1", "at least 0"),
    ("trainer.group_creation", "eagerly", "trainer.group_creation", "'eagerly'", "'lazy' or 'eager'"),
    ("engine.mem_fraction_static", 1.5, "engine.mem_fraction_static", "1.5", "less than 1"),
    ("engine.mem_fraction_static", math.nan, "engine.mem_fraction_static", "nan", "finite"),
    ("engine.tp", 16, "engine.tp", "16", "Use at most 8"),
    ("versions.torch", 2.11, "versions.torch", "2.11", "in quotes"),
    ("schema_version", 2, "schema_version", "2", "reads version 1"),
    ("name", "two words", "name", "'two words'", "characters"),
    ("name", "", "name", "''", "at least 1 characters"),
]


@pytest.mark.parametrize(
    ("path", "given", "field", "value", "said"), BAD, ids=[f"{row[0]}={row[1]}" for row in BAD]
)
def test_bad_fields_name_field_value_and_remedy(
    path: str, given: object, field: str, value: str, said: str
) -> None:
    problem = the_problem(changed(path, given))
    assert (problem.field, problem.value) == (field, value)
    assert said in str(problem)
    assert problem.remedy


SHAPE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("shape", "layout", "field", "value"),
    [
        ({"num_attention_heads": 6}, {"tp": 4}, "layout.tp", "4"),
        ({"num_query_groups": 3}, {}, "model.num_query_groups", "3"),
        ({}, {"ep": 2}, "layout.ep", "2"),
        ({"moe": {"num_experts": 6, "topk": 2, "ffn_hidden_size": 8}}, {"ep": 4}, "layout.ep", "4"),
        ({"moe": {"num_experts": 6, "topk": 7, "ffn_hidden_size": 8}}, {}, "model.moe.topk", "7"),
        ({"num_layers": 7}, {"pp": 2}, "layout.pp", "2"),
    ],
)
def test_model_and_layout_must_agree(
    shape: dict[str, Any], layout: dict[str, int], field: str, value: str
) -> None:
    document = GOOD | {"model": SHAPE | shape, "layout": layout}
    problem = the_problem(yaml.safe_dump(document).encode())
    assert (problem.field, problem.value) == (field, value)


def test_every_problem_is_named_at_once() -> None:
    document = GOOD | {"hardware": {"gpu": "h9", "gpus_per_node": 0}, "engine": {"tp": -1}}
    with pytest.raises(InvalidScenarioError, match="3 problems") as caught:
        parse_scenario(json.dumps(document).encode(), "body")
    assert [p.field for p in caught.value.problems] == ["hardware.gpu", "hardware.gpus_per_node", "engine.tp"]


def test_fields_are_named_from_the_documents_top() -> None:
    nested = {"scenario": GOOD | {"layout": {"tp": 3}}, "plan": {"name": "x", "training": "keep"}}
    with pytest.raises(InvalidInputError) as caught:
        validate(RunManifest, nested, "request body")
    assert [(p.field, p.value) for p in caught.value.problems] == [("scenario.layout.tp", "3")]


class _Plain(StrictModel):
    layout: Layout = Layout()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        raise ValueError("layout.pp: does not fit")


def test_a_models_validator_may_blame_a_field_in_plain_text() -> None:
    for given, value in (({"layout": {"pp": 3}}, "3"), ({"layout": {}}, "nothing, so the default")):
        with pytest.raises(InvalidInputError) as caught:
            validate(_Plain, given, "x")
        (problem,) = caught.value.problems
        assert (problem.field, problem.value, problem.problem) == ("layout.pp", value, "does not fit")
        assert "layout.pp" in problem.remedy


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        (b"name: a\nname: b\n", "line 2", "duplicate key 'name'"),
        (b'{"name": "a", "name": "b"}', "(document)", "duplicate key 'name'"),
        (b"a: {b: 1, b: 2}\n", "line 1", "duplicate key 'b'"),
        (b"a: &x [1]\nb: *x\n", "line 2", "aliases are not accepted"),
        (b"a: {b: 1\n", "line 2", ""),
        (b"a: " + b"[" * 40, "line 1", "nested more than 32 levels deep"),
        (b"[" * 400_000, "line 1", "nest"),
        (b"{" * 400_000, "line 1", "nest"),
        (b"a: !!python/object/apply:os.getcwd []\n", "line 1", "could not determine a constructor"),
        (b"a: \x00\n", "(document)", ""),
        (b"\xff\xfe\xff", "(document)", ""),
        (b"a: " + b"9" * 10_000, "(document)", "digits"),
        (b"a: 1\n---\nb: 2\n", "line 2", "another document"),
    ],
)
def test_unreadable_text_is_refused(text: bytes, where: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match="not valid YAML or JSON") as caught:
        parse_document(text, "x.yaml")
    (problem,) = caught.value.problems
    assert problem.field == where
    assert said in problem.problem
    assert problem.value
    assert problem.remedy


@pytest.mark.parametrize(("text", "value"), [(b"- 1\n", "[1]"), (b"just text", "'just text'"), (b"", "None")])
def test_a_document_is_a_mapping(text: bytes, value: str) -> None:
    with pytest.raises(InvalidInputError, match="not a mapping") as caught:
        parse_document(text, "x.yaml")
    assert caught.value.problems[0].value == value


def test_large_documents_are_refused_unparsed() -> None:
    with pytest.raises(InvalidInputError, match="too large") as caught:
        parse_document(b"#" * (MAX_DOCUMENT_BYTES + 1), "x.yaml")
    assert caught.value.problems[0].value == "1,000,001 bytes"


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(InvalidScenarioError, match="too large"):
        load_scenario(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read") as caught:
        load_scenario(tmp_path / name)
    assert caught.value.problems[0].field == "(file)"


def test_yaml_and_json_make_the_same_scenario(tmp_path: Path) -> None:
    forms = {
        "plain.yaml": yaml.safe_dump(GOOD),
        "plain.json": json.dumps(GOOD),
        "tabs.json": json.dumps(GOOD, indent="\t"),
    }
    digests = set()
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        digests.add(digest(load_scenario(tmp_path / name)))
    assert len(digests) == 1


def test_digest_tells_scenarios_apart() -> None:
    one, other = (parse_scenario(changed("layout.tp", tp), "x") for tp in (1, 2))
    assert digest(one) != digest(other)
    assert digest(one) == digest(parse_scenario(changed("layout.tp", 1), "another name"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\nb", "'a\\nb'"),
        ({"tp": 3, "pp": 2}, "{'tp': 3, 'pp': 2}"),
        ({"a": {}}, "a mapping with keys ['a']"),
        (list(range(9)), "a list of 9 items"),
    ],
)
def test_values_are_shown_on_one_short_line(value: object, shown: str) -> None:
    assert show_value(value) == shown


def test_long_values_are_cut() -> None:
    assert len(show_value("x" * 1000)) == 120
