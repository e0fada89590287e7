"""The README's commands exist and work as printed, and its plans are those that there are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from pitstop.cli.app import build_app, run
from pitstop.plan import NAMED_PLANS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PRINTED = [
    line.removeprefix("$ ").split(" #")[0].split(" > ")[0].strip()
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.removeprefix("$ ").startswith("pitstop ")
]
NAMED = sorted(set(re.findall(r"`pitstop ([a-z-]+(?: [a-z]+)?)", README)))
WITHOUT_SERVER = [line for line in PRINTED if not line.startswith(("pitstop serve", "pitstop db"))]


@pytest.mark.parametrize("name", NAMED)
def test_a_named_command_exists(name: str) -> None:
    command = typer.main.get_command(build_app())
    for word in name.split():
        commands = getattr(command, "commands", {})
        assert word in commands
        command = commands[word]


@pytest.mark.parametrize("line", WITHOUT_SERVER)
def test_a_printed_command_works(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(build_app, shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_commands_are_printed() -> None:
    assert any(line.startswith("pitstop predict ") for line in WITHOUT_SERVER)
    assert any(line.startswith("pitstop nccl-config ") for line in WITHOUT_SERVER)


def test_each_plan_is_explained() -> None:
    table = README.split("\n## The plans\n")[1].split("\n## ")[0]
    explained = [
        name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`([\w-]+)`", row)
    ]
    assert explained == list(NAMED_PLANS)


def test_the_shown_output_is_that_of_the_command() -> None:
    block = next(b for b in re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    command, shown = block.split("\n", 1)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pitstop")), *shlex.split(command.removeprefix("$ "))[1:]],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == shown.strip()
