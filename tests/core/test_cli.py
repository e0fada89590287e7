"""The command: exit codes, messages on stderr, data on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pitstop.cli.app import build_app, run
from pitstop.errors import MissingExtraError, PitstopError, UnsupportedScenarioError
from pitstop.plan import NAMED_PLANS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "h200x2-tp2.yaml")


def _failing(error: BaseException) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            UnsupportedScenarioError("measure one switch first"),
            3,
            "Scenario not supported by the evidence: measure",
        ),
        (MissingExtraError("pip install 'pitstop[service]'"), 4, "Optional part not installed: pip install"),
        (PitstopError("no such run"), 1, "no such run"),
        (RuntimeError("boom"), 70, "this is a bug in Pitstop"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_message_on_stderr_and_an_exit_code(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda: _failing(error), []) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in ("predict", "inventory", "plans", "evidence", "validate", "Exit codes", "70 a bug"):
        assert word in out


def test_plans_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["plans", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["baseline"] == "reload"
    assert [plan["name"] for plan in document["plans"]] == list(NAMED_PLANS)
    assert err == ""


def test_inventory_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["inventory", EXAMPLE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 2
    assert sum(c["count"] for c in document["classes"]) == 2


def test_an_unknown_plan_names_field_value_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(build_app, ["predict", EXAMPLE, "--plan", "leen"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "plan: no plan has this name (got 'leen'). Did you mean lean?" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "no-such-file.yaml"], "no-such-file.yaml"),
        (["predict", EXAMPLE, "--budget-gib", "-1"], "budget"),
        (["predict", EXAMPLE, "--budget-gib", "nan"], "budget"),
        (["predict", EXAMPLE, "--draws", "1"], "draws"),
        (["predict", EXAMPLE, "--evidence", "no-such-log.csv"], "no-such-log.csv"),
        (["evidence", "show", "no-such-corpus"], "no-such-corpus"),
        (["predict"], "SCENARIO"),
        (["frobnicate"], "frobnicate"),
        (["plans", "--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_input_and_usage_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(build_app, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_no_color_means_no_escape_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(build_app, ["plans"]) == 0
    out = capsys.readouterr().out
    assert "keep-window" in out
    assert "\x1b[" not in out


def test_as_a_process() -> None:
    command = [sys.executable, "-c", "from pitstop.cli import main; main()"]
    good = subprocess.run([*command, "plans", "--json"], capture_output=True, text=True, check=False)
    bad = subprocess.run([*command, "predict", "missing.yaml"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["plans"]
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "cannot be read" in bad.stderr
    assert "Traceback" not in bad.stderr
