"""The `pitstop` command: exit codes, messages, and what goes to which stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pitstop import __version__
from pitstop.cli.app import build_app, main, run
from pitstop.cli.output import emit_json, gib, seconds
from pitstop.errors import (
    FieldProblem,
    InvalidEvidenceError,
    InvalidInputError,
    MissingExtraError,
    PitstopError,
    UnsupportedScenarioError,
)
from pitstop.plan import NAMED_PLANS, Plan
from pitstop.prediction import Interval
from pitstop.units import GIB

SCENARIO = """\
name: two-gpus
hardware: {gpu: h200, gpus_per_node: 2}
layout: {tp: 2}
model: qwen3-4b
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Callable[[], typer.Typer]:
    def source() -> typer.Typer:
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

        @app.command()
        def fail() -> None:
            raise error

        return app

    return source


PROBLEM = FieldProblem("layout.tp", "3", "does not fit", "Use 2.")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvalidInputError("bad file", [PROBLEM]), 2, "layout.tp: does not fit (got 3). Use 2."),
        (InvalidEvidenceError("bad rows"), 2, "Invalid evidence: bad rows"),
        (UnsupportedScenarioError("measure more"), 3, "measure more"),
        (MissingExtraError("install pitstop[service]"), 4, "pitstop[service]"),
        (PitstopError("no luck"), 1, "no luck"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(5), 5, ""),
        (typer.BadParameter("not like this"), 2, "not like this"),
        (ZeroDivisionError("oh"), 70, "bug in Pitstop"),
    ],
)
def test_errors_become_exit_codes_and_messages(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(error), []) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert ("Traceback" in err) == (code == 70)


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["plans", "--nope"], ["inventory"], ["inventory", "x", "--rank", "one"]]
)
def test_wrong_usage_is_exit_code_2_with_a_hint(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--help" in err


def test_help_lists_commands_and_exit_codes() -> None:
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    assert "plans" in result.stdout
    assert "inventory" in result.stdout
    assert "Exit codes" in result.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["--version"]) == 0
    assert capsys.readouterr().out == f"pitstop {__version__}\n"


def test_a_broken_plugin_takes_no_other_command_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import EntryPoint

    broken = EntryPoint("broken", "no_such_package.commands:register", "pitstop.commands")
    monkeypatch.setattr("pitstop.cli.app.entry_points", lambda **_: [broken])
    assert run(build_app, ["plans", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plans"]
    assert "no_such_package" in err


def test_plans_json_holds_the_named_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["plans", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["baseline"] == "reload"
    assert {plan["name"]: Plan.model_validate(plan) for plan in printed["plans"]} == NAMED_PLANS


@pytest.mark.usefixtures("plain_terminal")
def test_plans_table_has_no_escape_codes_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["plans"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(name in out for name in NAMED_PLANS)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.usefixtures("plain_terminal")
def test_columns_set_the_width_of_a_table_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert run(build_app, ["plans"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.usefixtures("plain_terminal")
@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_honoured_where_colour_is_forced(
    no_color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scenario: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert run(build_app, ["inventory", str(scenario)]) == 0
    assert ("\x1b" in capsys.readouterr().out) != no_color


def test_inventory_json(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["inventory", str(scenario), "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = {group["name"]: group for group in found["groups"]}
    assert found["rank"] == 1
    assert groups["default_pg"]["ranks"] == [0, 1]
    assert groups["default_pg"]["shared_with"] == []
    tensor = groups["TENSOR_MODEL_PARALLEL_GROUP"]
    assert (tensor["backend"], tensor["size"], tensor["nodes"]) == ("nccl", 2, 1)
    assert tensor["created"] == "in step"
    assert tensor["used_in_export"]
    assert "MODEL_PARALLEL_GROUP" in tensor["shared_with"]
    assert groups["DATA_PARALLEL_GROUP"]["shared_with"] == []  # one rank: nothing to share
    assert sum(each["count"] for each in found["classes"]) == found["world_size"] == 2


def test_inventory_with_eager_creation_makes_every_group_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eager.yaml"
    path.write_text(SCENARIO + "trainer: {group_creation: eager}\n")
    assert run(build_app, ["inventory", str(path), "--json"]) == 0
    assert {group["created"] for group in json.loads(capsys.readouterr().out)["groups"]} == {"at start"}


@pytest.mark.parametrize(
    ("text", "rank", "said"),
    [
        (SCENARIO, "2", "rank: is not a rank"),
        (SCENARIO.replace("tp: 2", "tp: 3"), "0", "layout.tp: world size 2"),
        (
            SCENARIO.replace("h200", "h2000"),
            "0",
            "hardware.gpu: unknown GPU (got 'h2000'). Did you mean h200?",
        ),
    ],
)
def test_inventory_refuses_bad_input(
    text: str, rank: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert run(build_app, ["inventory", str(path), "--rank", rank]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(mean=4.774, lo=3.91, hi=5.58), "4.77 s [3.9, 5.6]"),
        (Interval(mean=118.32, lo=95.2, hi=140.8), "118.3 s [95, 141]"),
        (Interval(mean=0.361, lo=0.3, hi=0.45), "0.36 s [0.30, 0.45]"),
        (Interval(mean=-0.0001, lo=-0.2, hi=0.2), "0.00 s [-0.20, 0.20]"),
        (Interval(mean=2.0, lo=2.0, hi=2.0), "2.00 s"),
        (Interval(mean=0.0361, lo=0.03, hi=0.045), "0.036 s [0.030, 0.045]"),
        (0.0, "0 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_seconds_for_people(interval: Interval | float, text: str) -> None:
    assert seconds(interval) == text


def test_gib_for_people() -> None:
    assert gib(3.62 * GIB) == "3.62 GiB"
    assert gib(Interval(mean=3.62 * GIB, lo=3.4 * GIB, hi=3.9 * GIB)) == "3.62 GiB [3.4, 3.9]"


def test_json_never_holds_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        emit_json({"mean": float("nan")})
    assert capsys.readouterr().out == ""
    emit_json({"interval": Interval(mean=1, lo=0, hi=2)})
    assert json.loads(capsys.readouterr().out)["interval"]["hi"] == 2


def test_as_a_process(scenario: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    command = [sys.executable, "-c", "from pitstop.cli import main; main()"]

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
        )

    good = start("inventory", str(scenario), "--json")
    assert (good.returncode, json.loads(good.stdout)["scenario"]) == (0, "two-gpus")
    bad = start("inventory", str(scenario) + ".missing")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "cannot be read" in bad.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes differ")
def test_a_closed_pipe_is_no_reason_for_noise() -> None:
    code = "from pitstop.cli import main; main(['plans', '--json'])"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_heavy_imports_stay_out_of_the_start() -> None:
    code = (
        "import sys; from pitstop.cli.app import build_app, run; run(build_app, ['plans', '--json']); "
        "print([m for m in ('numpy', 'scipy', 'simpy', 'rich', 'fastapi', 'torch') if m in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"
