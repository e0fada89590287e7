"""docs/runtime.md says what is so: its code runs or is the example's, and its tables are those of the code.

So do the README's lines on the runtime.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bug_report_cases import Clock, PretendSaver, manager_of, total
from group_world import Way, World
from rank_server import FACTS, on_ranks
from trainer_example import EXAMPLE, ROOT, command

from pitstop.gates import Facts
from pitstop.plan import NAMED_PLANS
from pitstop_runtime import errors, executor
from pitstop_runtime.errors import SwitchError
from pitstop_runtime.executor import Limits
from pitstop_runtime.groups import BACKEND_NAME
from pitstop_runtime.manager import Settings, SwitchManager
from pitstop_runtime.recommendation import DEFAULT_POLL_S
from pitstop_runtime.saver import Recomputed
from pitstop_runtime.saver.preload import _START
from pitstop_runtime.telemetry.client import DEFAULT_QUEUE_SIZE
from pitstop_runtime.telemetry.spool import DEFAULT_CAP_BYTES

pytestmark = pytest.mark.megatron

GUIDE = (ROOT / "docs" / "runtime.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
OWN = [code for code in PYTHON if code not in EXAMPLE.read_text()]
SHELL = [code for language, code in BLOCKS if language == "sh"]


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(header: str) -> list[list[str]]:
    """Cells of the table with this first column's title."""
    table = GUIDE.split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def names(header: str) -> list[str]:
    return [name for first, *_ in rows(header) for name in re.findall(r"`(\w[\w-]*)`", first)]


def case_run(blocks: list[str]) -> dict[str, Any]:
    """Run what is no excerpt, one after the other, with the names that a trainer has."""
    world = World(Way.FRESH)
    manager = manager_of()
    gradients = torch.ones(1000)
    exported: list[float] = []
    saved: list[str] = []
    trainer = {
        "manager": manager,
        "step": 3,
        "export": lambda _: exported.append(total(world.whole)),
        "save_checkpoint": lambda: saved.append(manager.state.value),
        "Recomputed": Recomputed,
        "ddp": SimpleNamespace(buffers=[SimpleNamespace(grad_data=gradients)]),
    }
    for block in blocks:
        exec(textwrap.dedent(block), trainer)
    recomputed: Any = trainer["recomputed"]
    return {
        "exported": exported,
        "saved": saved,
        "plan": manager.plan.name,
        "registered": recomputed.held_bytes(),
    }


def test_code_runs_or_is_the_examples() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh"}
    assert len(PYTHON) - len(OWN) >= 5
    for found in on_ranks(case_run, 2, OWN):
        assert found == {"exported": [3.0], "saved": ["active"], "plan": "reload", "registered": 4000}


def case_readme(code: str) -> dict[str, Any]:
    """The README's lines, with the names that a trainer has; time passes by waiting only."""
    executor.time = Clock()  # type: ignore[assignment]
    world = World(Way.FRESH)
    joined: list[str] = []
    exported: list[float] = []
    trainer: dict[str, Any] = {
        "dist": SimpleNamespace(init_process_group=joined.append),
        "saver": PretendSaver(),
        "facts": FACTS,
        "steps": 2,
        "export": lambda _: exported.append(total(world.whole)),
    }
    exec(code, trainer)
    return {"joined": joined, "exported": exported, "plan": trainer["manager"].plan.name}


def test_the_readmes_lines_run() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for found in on_ranks(case_readme, 2, code):
        assert found == {"joined": [BACKEND_NAME], "exported": [3.0, 3.0], "plan": "lean"}


def test_what_is_installed_exists() -> None:
    (wanted,) = re.findall(r"pip install 'pitstop\[(\w+)\]'", SHELL[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert wanted == "trainer"
    assert "`pitstop[runtime]`" in GUIDE
    assert "pitstop[runtime]" in extras[wanted]
    said = dict(row[:2] for row in rows("needs"))
    for name, bounds in (("torch", (2.11, 2.15)), ("megatron-core", (0.16, 0.20))):
        (pinned,) = [
            each for group in ("runtime", "trainer") for each in extras[group] if each.startswith(f"{name}>")
        ]
        first, after = bounds
        assert pinned == f"{name}>={first},<{after:.2f}"
        assert said[name].startswith(f"{first} to {after - 0.01:.2f}")
    assert project["requires-python"] == f">={said['Python'].split()[0]}"


def test_the_start_is_the_one_that_the_savers_error_gives() -> None:
    preload, settings, start = SHELL[1].splitlines()
    written = _START.replace("\\\n ", "").split("python3 ...")[0]
    variables = f"{preload.removeprefix('export ')} {settings.removeprefix('export ')}"
    assert " ".join(variables.split()) in " ".join(written.split())
    assert shlex.split(start)[1:] == command()[-len(shlex.split(start)[1:]) :]
    program = shlex.split(preload.removeprefix("export LD_PRELOAD=$(").removesuffix(")"))
    found = subprocess.run(
        [sys.executable, *program[1:]], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(found).is_file()


@pytest.mark.parametrize(("header", "kind"), [("setting", Settings), ("limit", Limits)])
def test_settings_are_all_there_with_their_defaults(header: str, kind: Any) -> None:
    defaults = kind()
    expected = []
    for field in fields(kind):
        value = getattr(defaults, field.name)
        expected.append([f"`{field.name}`", "`Limits()`" if field.name == "limits" else f"`{value!r}`"])
    assert [row[:2] for row in rows(header)] == expected


def test_each_error_is_explained() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SwitchError)]
    assert sorted(names("error")) == sorted(kind.__name__ for kind in kinds)


def test_each_plan_is_explained() -> None:
    assert names("plan") == list(NAMED_PLANS)


def test_facts_to_state_are_facts() -> None:
    assert set(names("fact")) <= {field.name for field in fields(Facts)}
    stated = EXAMPLE.read_text().split("Facts(\n")[1].split("\n    )")[0]
    assert set(re.findall(r"(\w+)=", stated)) <= set(names("fact"))


def test_other_names_and_numbers() -> None:
    told = section("Telemetry and recommendations")
    assert f"{DEFAULT_QUEUE_SIZE} records" in told
    assert f"{DEFAULT_CAP_BYTES // 2**20} MiB" in told
    assert f"every {DEFAULT_POLL_S:g} s" in told
    for name in (
        "sleep",
        "wake_up",
        "update_weights",
        "training",
        "saving",
        "evaluating",
        "change_plan",
        "plan",
    ):
        assert hasattr(SwitchManager, name)
        assert f"`{name}`" in GUIDE or f"manager.{name}" in GUIDE
