"""Which plan a process follows: gates of all ranks, changes, and recommendations. ``case_`` functions run on ranks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rank_server import FACTS, logged, on_ranks
from telemetry_records import SCENARIO

from pitstop.gates import NOBODY, TORCH_MEMORY_SAVER, Facts
from pitstop.plan import BASELINE, NAMED_PLANS, Plan
from pitstop_runtime.choice import PlanChoice
from pitstop_runtime.control import Control
from pitstop_runtime.errors import GatesClosedError
from pitstop_runtime.recommendation import Recommendation, RecommendationClient

LEAN, KEEP = NAMED_PLANS["lean"], NAMED_PLANS["keep"]
# As read in a trainer in which every gate is open.
OPEN = replace(
    FACTS,
    nodes=1,
    ranks_per_gpu=1,
    accelerator="cpu",
    single_rank_groups_only=False,
    parallel_sizes={"tp": 2},
    torch="2.13.0",
    saver="0.0.10",
    backend="gloo",
    environment={},
    saver_name=TORCH_MEMORY_SAVER,
    saver_preloaded=True,
    double_wrapped_by=NOBODY,
    deepep_loaded=False,
    nvshmem_loaded=False,
    host_available_bytes=2**40,
    host_backup_bytes=2**30,
    split_share_communicators=False,
    offloads_trainer=True,
)
CRITIC = {"role": "critic"}
WRAPPED = {"double_wrapped_by": "slime"}  # closes the baseline too


def choice_of(
    plan: Plan,
    closed_on: dict[int, dict[str, Any]] | None = None,
    strict: bool = False,
    recommender: Any = None,
) -> PlanChoice:
    control = Control(10.0)
    return PlanChoice(plan, facts_of(control.rank, closed_on), control, recommender, strict=strict)


def facts_of(rank: int, closed_on: dict[int, dict[str, Any]] | None) -> Facts:
    return replace(OPEN, **(closed_on or {}).get(rank, {}))


def state_of(choice: PlanChoice) -> list[Any]:
    return [choice.enabling.stage, choice.enabling.plan.name, choice.enabling.reason]


def case_start(closed: dict[str, dict[str, Any]], strict: bool) -> list[Any]:
    try:
        choice = choice_of(LEAN, {int(rank): changes for rank, changes in closed.items()}, strict)
    except GatesClosedError as error:
        return ["refused", str(error)]
    return state_of(choice)


def test_open_gates_make_a_plan_eligible() -> None:
    assert on_ranks(case_start, 2, {}, False) == [["eligible", "lean", None]] * 2
    assert on_ranks(case_start, 2, {}, True) == [["eligible", "lean", None]] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_gates_that_are_closed_on_one_rank_send_all_back(rank: int) -> None:
    answers = on_ranks(case_start, 3, {rank: CRITIC}, False)
    assert answers == [answers[0]] * 3
    stage, plan, reason = answers[0]
    assert (stage, plan) == ("fallen-back", "lean")
    assert reason.startswith(
        f"rank {rank}: lean may not be carried out here\n  - actor-role (closed): critic."
    )


def test_the_lowest_of_several_ranks_is_quoted() -> None:
    closed = {1: CRITIC, 2: {"colocated": False}}
    for _, _, reason in on_ranks(case_start, 3, closed, False):
        assert reason.startswith("rank 1: ")
        assert "colocated" not in reason


def test_doubt_on_one_rank_sends_all_back() -> None:
    for stage, _, reason in on_ranks(case_start, 2, {1: {"weights_backed_up": None}}, False):
        assert stage == "fallen-back"
        assert "weights-backed-up (unknown)" in reason


def test_strict_gates_raise_on_all_ranks() -> None:
    for outcome, text in on_ranks(case_start, 2, {1: CRITIC}, True):
        assert outcome == "refused"
        assert text.startswith("rank 1: lean may not be carried out here")


@pytest.mark.parametrize("strict", [False, True])
def test_without_even_the_baseline_there_is_no_way_on(strict: bool) -> None:
    for outcome, text in on_ranks(case_start, 2, {1: WRAPPED}, strict):
        assert outcome == "refused"
        assert text.startswith("rank 1: reload may not be carried out here\n  - double-wrapping (closed)")


# Changes.


def case_change() -> dict[str, Any]:
    choice = choice_of(KEEP, {1: {"host_available_bytes": 0}})  # refuses retained backups only
    window = NAMED_PLANS["keep-window"]
    answers = {
        "closed": (choice.change(LEAN), *state_of(choice)),
        "open": (choice.change(window), *state_of(choice)),
    }
    choice.enabling.prove()
    answers["proven"] = (choice.change(KEEP), *state_of(choice))
    choice.give_up("rank 1: canary")
    answers["after"] = (choice.change(window), choice.change(BASELINE), *state_of(choice))
    return answers


def test_a_change_needs_open_gates_and_no_fall_back() -> None:
    for answers in on_ranks(case_change, 2):
        assert answers == {
            "closed": [False, "eligible", "keep", None],
            "open": [True, "eligible", "keep-window", None],
            "proven": [True, "ready", "keep", None],
            "after": [False, False, "fallen-back", "keep", "rank 1: canary"],
        }


# Recommendations.


class Adviser:
    """Recommends what it is told to, and keeps what it hears."""

    def __init__(self) -> None:
        self.newest: Recommendation | None = None
        self.heard: list[tuple[str, str, str]] = []
        self.asked = 0

    def advise(self, plan: Plan | None, name: str = "r-1") -> None:
        later = datetime.now(UTC) + timedelta(hours=1)
        self.newest = None if plan is None else Recommendation(id=name, plan=plan, expires_at=later)

    def current(self) -> Recommendation | None:
        self.asked += 1
        return self.newest

    def report(self, recommendation_id: str, outcome: str, detail: str = "") -> None:
        self.heard.append((recommendation_id, str(outcome), detail))


class BrokenAdviser:
    def current(self) -> Recommendation | None:
        raise OSError("no such service")

    def report(self, recommendation_id: str, outcome: str, detail: str = "") -> None:
        raise OSError(f"cannot tell of {recommendation_id} {outcome} {detail}")


def switch(choice: PlanChoice, *, sync: bool = True) -> str:
    """A whole switch; which plan it began with."""
    choice.begin_switch()
    begun = choice.enabling.in_force.name
    if sync:
        choice.enabling.prove()
    choice.end_switch()
    return begun


def start(adviser: Any, closed_on: dict[int, dict[str, Any]] | None = None) -> PlanChoice:
    """Only rank 0 has somebody to ask."""
    control = Control(10.0)
    asks = adviser if control.rank == 0 else None
    return PlanChoice(KEEP, facts_of(control.rank, closed_on), control, asks, strict=False)


def case_follow() -> dict[str, Any]:
    adviser = Adviser()
    choice = start(adviser)
    begun = [switch(choice), switch(choice)]
    adviser.advise(LEAN)
    begun += [switch(choice), switch(choice)]
    adviser.advise(LEAN, "r-2")  # the same plan by another name
    begun.append(switch(choice))
    adviser.advise(None)  # expired, or taken back
    begun.append(switch(choice))
    return {"begun": begun, "heard": adviser.heard, "asked": adviser.asked}


def test_a_recommended_plan_is_followed_while_it_holds() -> None:
    first, second = on_ranks(case_follow, 2)
    for answer in (first, second):
        # The first switch goes the baseline's way: no weight sync went well yet.
        assert answer["begun"] == ["reload", "keep", "lean", "lean", "lean", "keep"]
    assert first["heard"] == [["r-1", "applied", ""], ["r-2", "applied", ""]]
    assert (first["asked"], second["asked"], second["heard"]) == (6, 0, [])


def case_unproven() -> list[Any]:
    adviser = Adviser()
    choice = start(adviser)
    adviser.advise(LEAN)
    begun = [switch(choice, sync=False), switch(choice)]
    before = list(adviser.heard)
    begun.append(switch(choice))
    return [begun, before, adviser.heard]


def test_applied_is_said_once_a_whole_switch_went_by_the_plan() -> None:
    (begun, before, heard), *_ = on_ranks(case_unproven, 2)
    assert begun == ["reload", "reload", "lean"]
    assert before == []
    assert heard == [["r-1", "applied", ""]]


def case_refused() -> dict[str, Any]:
    adviser = Adviser()
    choice = start(adviser, {1: {"host_available_bytes": 0}})
    begun = [switch(choice)]
    adviser.advise(NAMED_PLANS["keep-window"])
    begun.append(switch(choice))
    adviser.advise(LEAN, "r-2")
    with logged() as said:
        begun += [switch(choice), switch(choice), switch(choice)]
    return {"begun": begun, "heard": adviser.heard, "said": len(said)}


def test_a_recommendation_that_gates_refuse_is_reported_and_not_tried_again() -> None:
    first, second = on_ranks(case_refused, 2)
    for answer in (first, second):
        assert answer["begun"] == ["reload", "keep-window", "keep-window", "keep", "keep"]
        assert answer["said"] == 1
    applied, refused = first["heard"]
    assert applied == ["r-1", "applied", ""]
    assert refused[:2] == ["r-2", "refused"]
    assert refused[2].startswith("rank 1: lean may not be carried out here\n  - host-memory (closed)")


def case_failed() -> list[Any]:
    adviser = Adviser()
    choice = start(adviser)
    adviser.advise(LEAN)
    begun = [switch(choice), switch(choice)]
    choice.begin_switch()
    choice.give_up("rank 1: canary")
    choice.give_up("again")
    choice.end_switch()
    adviser.advise(KEEP, "r-2")
    begun += [switch(choice), switch(choice)]
    return [begun, adviser.heard]


def test_a_fall_back_is_reported_and_ends_all_following() -> None:
    (begun, heard), (others, _) = on_ranks(case_failed, 2)
    assert begun == others == ["reload", "lean", "reload", "reload"]
    assert heard == [
        ["r-1", "applied", ""],
        ["r-1", "failed", "rank 1: canary"],
        ["r-2", "refused", "fallen back to reload: rank 1: canary"],
    ]


def case_end() -> list[Any]:
    adviser = Adviser()
    choice = start(adviser)
    choice.end("nothing was followed")
    adviser.advise(LEAN)
    switch(choice)
    choice.end("rank 3 is lost")
    choice.end("once more")
    return adviser.heard


def test_the_end_of_a_process_is_a_failure_of_what_it_followed() -> None:
    heard, _ = on_ranks(case_end, 2)
    assert heard == [["r-1", "failed", "rank 3 is lost"]]


def case_own_change() -> list[str]:
    adviser = Adviser()
    choice = start(adviser)
    begun = [switch(choice)]
    choice.change(NAMED_PLANS["keep-window"])
    begun.append(switch(choice))
    adviser.advise(LEAN)
    begun.append(switch(choice))
    adviser.advise(None)
    begun.append(switch(choice))
    return begun


def test_after_a_recommendation_comes_what_was_chosen_last() -> None:
    for begun in on_ranks(case_own_change, 2):
        assert begun == ["reload", "keep-window", "lean", "keep-window"]


def case_broken() -> list[Any]:
    choice = start(BrokenAdviser())
    with logged() as said:
        begun = [switch(choice), switch(choice)]
        choice.give_up("canary")
        begun.append(switch(choice))
    return [begun, said[0]]


def test_an_adviser_that_raises_harms_nobody() -> None:
    (begun, said), (others, _) = on_ranks(case_broken, 2)
    assert begun == others == ["reload", "keep", "reload"]
    assert said == "no recommendation: no such service"


def case_client() -> list[str]:
    with RecommendationClient(None, SCENARIO) as client:
        choice = start(client)
        return [switch(choice), switch(choice)]


def test_a_client_without_a_service_is_accepted() -> None:
    assert on_ranks(case_client, 2) == [["reload", "keep"]] * 2


def case_nobody_to_ask() -> list[Any]:
    control = Control(10.0)
    choice = PlanChoice(KEEP, facts_of(control.rank, None), control, None, strict=False)
    calls: list[str] = []
    control.any = lambda *_: calls.append("any")  # type: ignore[assignment, method-assign, func-returns-value]
    return [switch(choice), switch(choice), calls]


def test_without_recommendations_a_switch_asks_nobody() -> None:
    assert on_ranks(case_nobody_to_ask, 2) == [["reload", "keep", []]] * 2
