"""Faults that users of colocated trainers have reported: each kind is made to happen, and the runtime deals with it.

``bug_reports`` is the table of reports; ``bug_report_cases`` and ``bug_report_memory`` are what ranks do.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import bug_report_cases as cases
import bug_report_memory as memory
import pytest
from bug_reports import HERE, REPORTS
from rank_server import FACTS, on_ranks

from pitstop.gates import TORCH_MEMORY_SAVER, judge
from pitstop.plan import NAMED_PLANS

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[2]
RELOADS = ["reload", "reload-deferred"]

# The table.


@cache
def names_in(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text()).body
    return {each.name for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


@pytest.mark.parametrize("address", REPORTS)
def test_each_report_is_shown_by_tests_that_exist(address: str) -> None:
    report = REPORTS[address]
    owner, _, number = address.partition("#")
    assert owner.count("/") == 1
    assert number.isdigit()
    assert report.shown_by or not report.trainers_side
    for node in report.shown_by:
        path, _, name = node.partition("::")
        assert name in names_in(path), node


def test_each_test_here_shows_a_report() -> None:
    shown = {node for report in REPORTS.values() for node in report.shown_by}
    about_the_table = {"test_each_report_is_shown_by_tests_that_exist", "test_each_test_here_shows_a_report"}
    assert {f"{HERE}::{name}" for name in names_in(HERE) - about_the_table} <= shown


# Groups.


def test_on_one_rank_every_plan_switches_and_wraps_nothing() -> None:
    (found,) = on_ranks(cases.case_alone, 1)
    assert found == {"sums": dict.fromkeys(NAMED_PLANS, [1.0] * 3), "managed": 0, "communicators": 0}


def test_an_invalid_group_is_no_reason_to_end_a_run() -> None:
    fine, damaged = on_ranks(cases.case_invalid_group, 2)
    for found in (fine, damaged):
        assert found["sums"] == [3.0] * 3
        assert found["state"] == "active"
    assert fine["said"] == []
    (said,) = damaged["said"]
    assert said.startswith("communicator TENSOR_MODEL_PARALLEL_GROUP over ranks [0, 1]: destroying it raised")


def test_groups_that_another_library_wraps_are_not_switched() -> None:
    for error, text in on_ranks(cases.case_wrapped, 2):
        assert error == "GatesClosedError"
        assert (
            "rank 1: reload may not be carried out here\n  - double-wrapping (closed): wrapped by slime"
            in text
        )


@pytest.mark.parametrize(
    ("plan", "canary_passed", "stage", "reason"),
    [
        (
            "keep",
            None,
            "fallen-back",
            "cross-node (unknown): 2 nodes, no cross-node canary run yet. Refused until",
        ),
        ("lean", False, "fallen-back", "cross-node (closed): 2 nodes, cross-node canary failed"),
        ("keep", True, "eligible", ""),
        ("lean-copies", True, "fallen-back", "copies-one-node (closed): 2 nodes. Use lean-released"),
        ("reload", None, "ready", ""),
    ],
)
def test_across_nodes_a_group_is_kept_only_after_a_canary_there(
    plan: str, canary_passed: bool | None, stage: str, reason: str
) -> None:
    for found_stage, found_reason in on_ranks(cases.case_two_nodes, 2, plan, canary_passed):
        assert found_stage == stage
        assert reason in found_reason
        assert bool(reason) == bool(found_reason)


def test_with_deepep_loaded_nothing_is_destroyed() -> None:
    for plan in ("reload", "lean"):  # a fall-back to the baseline would destroy
        for error, text in on_ranks(cases.case_deepep, 2, plan, False):
            assert error == "GatesClosedError"
            assert (
                "rank 1: reload may not be carried out here\n  - deepep (closed): alive: DeepEP buffer"
                in text
            )
            assert "Buffer.destroy()" in text
    assert on_ranks(cases.case_deepep, 2, "lean", True) == [["eligible", ""]] * 2


def test_graphs_with_registered_buffers_keep_no_communicator() -> None:
    facts = replace(
        FACTS, uses_cuda_graphs=True, backend="nccl", saver_name=TORCH_MEMORY_SAVER, nodes=1, environment={}
    )
    refused = []
    for plan in NAMED_PLANS.values():
        text = str(judge(plan, facts))
        if "nccl-graph-register (closed): CUDA graphs, NCCL_GRAPH_REGISTER is on" in text:
            refused.append(plan.name)
            assert "Set NCCL_GRAPH_REGISTER=0 before graphs are captured" in text
            assert "fzyzcjy/torch_memory_saver#88" in text
    # All under which a communicator lives through the pause.
    assert refused == [name for name in NAMED_PLANS if name not in (*RELOADS, "lean-copies")]
    off = replace(facts, environment={"NCCL_GRAPH_REGISTER": "0"})
    assert all("nccl-graph-register" not in str(judge(plan, off)) for plan in NAMED_PLANS.values())


# Ports.


@pytest.mark.parametrize(
    ("plan", "communicators"),
    [*((plan, 3) for plan in (*RELOADS, "keep-window")), ("lean-released", 2), ("lean-copies", 2)],
)
def test_ports_have_their_cooldown_before_a_rebuild(plan: str, communicators: int) -> None:
    for found in on_ranks(cases.case_ports, 2, plan, 60.0, 55.0):
        assert found["ended"] == ["done", ""]
        assert found["destroyed"] == communicators, "all, the default group's too"
        assert found["state"] == "active"


def test_without_a_cooldown_ports_are_missed() -> None:
    """The same with a cooldown that is too short: the error says what was missed."""
    for error, text in (found["ended"] for found in on_ranks(cases.case_ports, 2, "reload", 1.0, 55.0)):
        assert error == "SwitchError"
        assert text.endswith("could not be built: Address already in use")


# Memory.


def test_memory_promised_to_the_engine_is_measured() -> None:
    elsewhere, here = on_ranks(memory.case_engine_memory, 2)
    for found in (elsewhere, here):
        assert found["sleep"][0] == "HandOverError"
        assert found["then"] == "paused-released", "nothing is lost: wake_up is possible"
        assert (found["total"], found["state"]) == (3.0, "active")
    assert "promised to the engine is not free on another rank's GPU" in elsewhere["sleep"][1]
    for figure in ("60.00 GiB of device memory are needed", "50.00 GiB are missing", "10.00 GiB free"):
        assert figure in here["sleep"][1]


def test_no_rank_leaves_sleep_before_all_have_paused() -> None:
    found = on_ranks(memory.case_late_pause, 3)
    assert found[1]["paused"] > found[0]["paused"], "rank 1 was late"
    assert min(each["left"] for each in found) >= max(each["paused"] for each in found)


def test_a_wake_up_without_room_does_nothing_and_can_be_repeated() -> None:
    elsewhere, here = on_ranks(memory.case_no_room_to_wake, 2)
    for found in (elsewhere, here):
        assert found["refused"][0] == "HandOverError"
        assert found["state"] == "paused-released"
        assert found["untouched"]
        assert (found["total"], found["plan"], found["then"]) == (3.0, "lean-released", "active")
    assert "the engine still holds memory there" in elsewhere["refused"][1]
    for figure in ("8.00 GiB of device memory are needed", "5.00 GiB are missing", "8.00 GiB of it paused"):
        assert figure in here["refused"][1]


def test_first_collectives_are_over_before_training_fills_the_memory() -> None:
    for found in on_ranks(memory.case_full_memory, 2):
        assert found.pop("seen")
        assert found == {plan: [["done", ""]] * 2 for plan in ("reload", "reload-deferred", "lean-released")}


def test_a_damaged_weight_ends_the_run_on_all_ranks() -> None:
    other, damaged = on_ranks(memory.case_damaged, 2)
    text = "parameter layer.weight changed while memory was paused"
    assert damaged["woken"][0] == "CorruptedMemoryError"
    assert other["woken"][0] == "RankFailedError"
    for found in (other, damaged):
        assert text in found["woken"][1]
        assert found["state"] == "failed"
        assert found["training"][0] == "ForbiddenTransitionError"
        assert text in found["training"][1]


# Leaks.


def test_twenty_switches_leave_nothing_behind() -> None:
    for found in on_ranks(memory.case_many_switches, 2, False):
        assert found["said"] == []
        if counts := found["counts"]:  # of rank 0: the highest of all ranks
            assert len(counts) == 20
            assert {each["communicators"] for each in counts} == {counts[0]["communicators"]}
            for what in ("sockets", "threads"):
                assert max(each[what] for each in counts[10:]) <= max(each[what] for each in counts[:10]) + 2


def test_a_group_leaked_in_each_switch_is_an_alarm() -> None:
    for found in on_ranks(memory.case_many_switches, 2, True):
        alarms = [
            text for text in found["said"] if text.startswith("communicators rose in each of the last 5")
        ]
        assert len(alarms) == 3, "after the sixth switch, and after each one since"
        assert "Look for groups made anew in each step" in alarms[0]


# Other entry points.


def test_a_save_while_asleep_is_refused_and_harms_nothing() -> None:
    for found in on_ranks(cases.case_save_asleep, 2):
        error, text = found["refused"]
        assert error == "ForbiddenTransitionError"
        assert text.startswith("save() is not allowed now: the state is paused-live")
        assert "Call wake_up() first." in text
        assert (found["state"], found["saved"], found["saved then"]) == ("paused-live", [], ["saved"])
        assert found["kept"]
        assert (found["total"], found["stage"]) == (3.0, "ready")


def test_groups_destroyed_behind_the_switch_are_a_failed_sync_and_no_crash() -> None:
    for found in on_ranks(cases.case_destroyed_behind, 2):
        error, text = found["sync"]
        assert error == "ValueError"
        assert "is not initialized in the world group map" in text
        assert found["state"] == "paused-released"
        assert (found["total"], found["stage"], found["plan"]) == (3.0, "fallen-back", "reload")


# Weight sync.


def test_an_export_that_ipc_refuses_is_found_before_the_first_switch() -> None:
    other, here = (found["made"] for found in on_ranks(cases.case_ipc, 2, False))
    assert here[0] == "SwitchError"
    assert here[1].startswith(
        "weights cannot be handed over by CUDA IPC: CUDA error: invalid argument. Allocate"
    )
    assert other[0] == "RankFailedError"
    assert "rank 1: SwitchError on rank 1" in other[1]
    assert "saver.disabled()" in other[1]


def test_the_export_that_is_tried_is_not_of_the_savers_memory() -> None:
    assert on_ranks(cases.case_ipc, 2, True) == [{"made": ["ready", ""]}] * 2


def test_an_engine_that_kept_its_old_weights_is_found_out() -> None:
    other, stale = on_ranks(cases.case_stale_engine, 2)
    text = "the engine does not have the weights that were sent: sent 7, it says 0"
    assert stale["sync"][0] == "SwitchError"
    assert other["sync"][0] == "RankFailedError"
    for found in (other, stale):
        assert text in found["sync"][1]
        assert found["state"] == "paused-released"
        # Once the engine is in order, the sync is repeated, the baseline's way.
        assert (found["version"], found["total"], found["plan"]) == (7, 3.0, "reload")


def test_a_sync_that_was_fast_is_no_sync_that_went_well() -> None:
    for found in on_ranks(cases.case_unconfirmed, 2):
        assert found["sync"][0] == "SwitchError"
        assert "the export ended without confirm()" in found["sync"][1]
        assert (found["total"], found["plan"]) == (3.0, "reload")
