"""Training with a switch after every step is bit-identical to training that never switches, under every plan.

Real Megatron-core over gloo: losses, gradient norms and parameter hashes of every rank, over 8 steps and 7 switches.
In two layouts the real torch_memory_saver pauses the memory, over a stand-in driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pitstop.plan import NAMED_PLANS

pytestmark = pytest.mark.megatron

TESTS = Path(__file__).parents[1]
STEPS = 8
DISTRIBUTED = {"distributed_optimizer": True, "sequence_parallel": True, "overlap": True}
EXPERTS = {"experts": 8, "etp": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-dp2-distopt-sp-overlap": (4, {"tp": 2, **DISTRIBUTED}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2, **DISTRIBUTED}),
    "cp2": (2, {"cp": 2}),
    "ep4": (4, {"ep": 4, **EXPERTS}),
    "tp2-cp2-ep4": (4, {"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": True, **EXPERTS}),
}
WITH_SAVER = ("tp2", "tp2-dp2-distopt-sp-overlap")
# What each plan leaves of the training communicators while the trainer sleeps; gloo cannot suspend.
ASLEEP = {
    "reload": "paused-released",
    "reload-deferred": "paused-released",
    "keep-window": "paused-live",
    "keep": "paused-live",
    "suspend": "paused-released",
    "lean": "paused-live",
    "lean-released": "paused-released",
    "lean-copies": "paused-released",
}


def run(jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Answers of all ranks, per job."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_cpu.switch_run"],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def jobs_of(layout: str, *, saver: bool) -> list[dict[str, Any]]:
    world_size, options = LAYOUTS[layout]
    job = {"world_size": world_size, "options": options, "steps": STEPS}
    return [
        {**job, "plan": None},
        *({**job, "plan": plan, "saver": saver} for plan in NAMED_PLANS),
    ]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in WITH_SAVER])
def test_training_is_bit_identical_under_every_plan(layout: str) -> None:
    never, *switched = run(jobs_of(layout, saver=False))
    for plan, ranks in zip(NAMED_PLANS, switched, strict=True):
        compare(plan, never, ranks)


@pytest.mark.parametrize("layout", WITH_SAVER)
def test_training_is_bit_identical_with_the_real_memory_saver(layout: str) -> None:
    never, *switched = run(jobs_of(layout, saver=True))
    for plan, ranks in zip(NAMED_PLANS, switched, strict=True):
        compare(plan, never, ranks)
        assert all(paused > 0 for rank in ranks for paused in rank["paused"]), f"{plan}: nothing was paused"


def compare(plan: str, never: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
    for rank, (expected, found) in enumerate(zip(never, ranks, strict=True)):
        for what in ("losses", "norms", "digests", "exports"):
            assert found[what] == expected[what], f"{plan}, rank {rank}: {what} differ"
        assert len(found["losses"]) == STEPS
        assert len(found["states"]) == STEPS - 1
        # The first switch goes the baseline's way: nothing is kept before a weight sync went well.
        assert found["states"][0] == "paused-released"
        assert set(found["states"][1:]) == {ASLEEP[plan]}
        assert found["stage"] == ("fallen-back" if plan == "suspend" else "ready"), found["reason"]
    records = ranks[0]["records"]
    assert [record["step"] for record in records] == list(range(STEPS - 1))
    assert all(set(record["phases"]) == {"sleep", "update_weights", "wake_up"} for record in records)
    counts = [record["counts"] for record in records[1:]]
    assert all(count["sockets"] <= counts[0]["sockets"] + 2 for count in counts), counts
