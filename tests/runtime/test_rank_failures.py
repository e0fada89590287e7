"""One of four ranks fails, at each point of a switch in turn: nobody hangs, all agree, and the log says who and where.

``failure_cells`` is the table; ``failure_run`` plays it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from failure_cells import BESIDE, POINTS, VICTIM, WORLD_SIZE, C, Cell, all_cells

from pitstop.components import Phase

HERE = Path(__file__).resolve().parent
# How long the machine may leave a rank without a CPU while others are tested beside.
LOAD_S = 20.0
CONTROL = "communicator PITSTOP_CONTROL over all 4 ranks"
RESTART = "Restart the job from its last checkpoint."
REFUSAL = "Call shutdown(), and restart from a checkpoint."

pytestmark = pytest.mark.fault

Answer = dict[str, Any]


class Player:
    """The process that forks the ranks: it imports torch once."""

    def __init__(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")])),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "failure_run.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, cells: Iterable[Cell]) -> tuple[float, list[Any]]:
        """The longest wait in seconds by the limits in force, and what the ranks of each cell saw, or a text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([asdict(cell) | {"lost": cell.lost} for cell in cells]),
            file=self._process.stdin,
            flush=True,
        )
        longest_s, answers = json.loads(self._process.stdout.readline())
        return longest_s, answers

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    player = Player()
    yield player
    player.close()


@pytest.mark.parametrize("how", ["raise", "corrupt", "stall", "kill"])
def test_one_rank_fails(how: str, player: Player) -> None:
    cells = list(all_cells(how))
    longest_s, answers = player.play(cells)
    bound_s = longest_s + LOAD_S
    assert len(answers) == len(cells)
    found = [
        f"{cell}: {problem}"
        for cell, answer in zip(cells, answers, strict=True)
        for problem in problems(cell, answer, bound_s)
    ]
    assert not found, "\n".join(found)


def problems(cell: Cell, answer: list[Answer | None] | str, bound_s: float) -> Iterator[str]:
    """What is not as it has to be."""
    if isinstance(answer, str):
        yield answer
        return
    ranks = [seen for rank, seen in enumerate(answer) if rank not in cell.lost]
    for seen in ranks:
        if seen is None:
            yield "a rank has no answer"
            return
    survivors: list[Answer] = [seen for seen in ranks if seen is not None]
    for seen in survivors:
        if seen["seconds"] > bound_s:
            yield f"rank {seen['rank']} took {seen['seconds']:.1f} s of at most {bound_s:g} s"
    check = went_on if cell.goes_on else ended
    for seen in survivors:
        yield from (f"rank {seen['rank']}: {problem}" for problem in check(cell, seen))
        yield from (f"rank {seen['rank']}: {problem}" for problem in said(cell, seen))
    if len(verdicts := {verdict(cell, seen) for seen in survivors}) > 1:
        yield f"the ranks do not agree: {sorted(verdicts)}"


def ended(cell: Cell, seen: Answer) -> Iterator[str]:
    """The state is FAILED, and every further call is refused with what to do."""
    if seen["state"] != "failed":
        yield f"the state is {seen['state']}"
    if REFUSAL not in seen.get("refusal", ""):
        yield f"the next call was not refused with what to do: {seen.get('refusal')}"
    if seen["stage"] == "fallen-back":
        yield "it fell back"
    if len(seen["errors"]) != 1:
        yield f"not one error: {seen['errors']}"
        return
    ((kind, text),) = seen["errors"]
    own = {"raise": "InjectedError", "corrupt": "CanaryError", "stall": "SwitchError CanaryError"}.get(
        cell.how, ""
    )
    if kind == "RankFailedError":
        if not text.endswith(RESTART):
            yield f"the error does not say what to do: {text}"
    elif kind not in own.split() or (cell.how == "raise" and seen["rank"] != cell.victim):
        yield f"another kind of error: {kind}: {text}"


def went_on(cell: Cell, seen: Answer) -> Iterator[str]:
    """The switch ended in the baseline, and so did the next one."""
    if (seen["state"], seen["stage"], seen["in_force"]) != ("active", "fallen-back", "reload"):
        yield f"{seen['state']}, {seen['stage']}, plan {seen['in_force']}"
    if seen["failure"] is not None or "refusal" in seen:
        yield f"failure: {seen['failure']}, refusal: {seen.get('refusal')}"
    # A weight sync that fails is the trainer's to repeat; a sleep is repaired inside.
    if len(seen["errors"]) != (cell.phase is Phase.UPDATE_WEIGHTS):
        yield f"errors: {seen['errors']}"
    if cell.how == "raise" and (seen["errors"][0][0] == "InjectedError") != (seen["rank"] == cell.victim):
        yield f"another's error: {seen['errors']}"


def verdict(cell: Cell, seen: Answer) -> str:
    """What a rank holds for the reason: the same on all of them."""
    text = str(seen["reason"] if cell.goes_on else seen["failure"])
    if cell.lost:  # each tells of its own wait; whom it missed is what they have to agree about
        return ", ".join(re.findall(r"missing: (?:.(?!; |\. Cause))*.", text)) or text
    return text


def said(cell: Cell, seen: Answer) -> Iterator[str]:
    """The verdict and the log name the rank, the communicator and the component."""
    text, log = verdict(cell, seen), "\n".join(line for line in seen["log"] if line.startswith("ERROR "))
    beside = (cell.plan, cell.phase, cell.component) in BESIDE
    point = re.escape(cell.point)
    # Who waits for what runs in a thread may be held up elsewhere in the same phase.
    place = f"{cell.phase}/[a-z_.]+" if beside else point
    where = rf"{point} \(plan {cell.plan}, switch \d\)"
    if CONTROL not in log:
        yield f"the log does not name the communicator of the agreement: {log}"
    if not re.search(place, log) and not (cell.how == "kill" and cell.victim == 0):
        yield f"the log does not name {cell.point}: {log}"
    if cell.how == "raise":
        wanted = rf"rank {cell.victim}: InjectedError on rank {cell.victim} in {where}: injected$"
    elif cell.how == "corrupt":
        # A sum cannot say who sent the wrong number, only where: the members of the communicator are named.
        wanted = (
            rf"rank \d: CanaryError on rank \d in {where}: "
            rf"communicator [A-Za-z_, ]+ over ranks \[[0-3, ]*{cell.victim}[0-3, ]*\]: sums \["
        )
    elif not cell.lost:  # it stalled in a thread, and its own time limit is as long as that of the others
        wanted = rf"rank \d: (SwitchError|CanaryError) on rank \d in {place} .*(rank {cell.victim}|did not end within)"
    elif cell.how == "kill" and cell.victim == 0:
        # What rank 0 noted is gone with the store that it hosted; where the others were is all there is.
        wanted = r"missing: rank 0(, it seems|)"
        if not re.search(rf"\(last in {cell.phase}/", str(seen["failure"])):
            yield f"the failure does not name a component: {seen['failure']}"
    else:
        seen_in = (
            rf"[a-z_./]*, beside that in {point}" if beside else rf"{point}(, beside that in [a-z_./]+)?"
        )
        wanted = rf"missing: rank {cell.victim} \(last seen in {seen_in}\)$"
    if not re.match(wanted, text):
        yield f"the verdict is {text!r}, not {wanted!r}"


def test_every_component_of_every_plan_is_in_the_table(player: Player) -> None:
    plans = list(POINTS)
    _, answers = player.play(Cell(plan, Phase.SLEEP, C.CLEAR_MEMORY, "watch", VICTIM) for plan in plans)
    for plan, answer in zip(plans, answers, strict=True):
        assert isinstance(answer, list), answer
        assert len(answer) == WORLD_SIZE
        for seen in answer:
            gone_through = [tuple(point.split("/")) for point in seen["seen"]]
            assert in_order(plan, gone_through) == in_order(plan, POINTS[plan]), (plan, seen["rank"])
            assert set(gone_through) == set(POINTS[plan])


def in_order(plan: str, points: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Points but those that run beside others, whose place among them is chance."""
    return [(phase, component) for phase, component in points if (plan, phase, component) not in BESIDE]
