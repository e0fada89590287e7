"""Agreement of forked ranks over gloo: objections, fingerprints, alarms, and ranks that are lost.

Each ``case_`` function runs on every rank.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from rank_server import on_ranks

from pitstop_runtime import control as module
from pitstop_runtime.control import Control, Objection
from pitstop_runtime.errors import RankFailedError, SwitchError

RANKS = 3
PATIENT_S = 20.0
HASTY_S = 0.6
LOAD_S = 5.0  # for which a busy machine may leave a rank without a CPU

Said = tuple[int, str, bool] | None


def told(objection: Objection | None) -> Said:
    return None if objection is None else (objection.rank, objection.reason, objection.fatal)


def case_agreements() -> dict[str, Said]:
    """Who objects in each round: (rank, reason, fatal), or None."""
    control = Control(PATIENT_S)
    me = control.rank

    def round_of(reasons: dict[int, str], fatal: tuple[int, ...] = (), fingerprint: int = 0) -> Said:
        return told(control.agree("sleep", reasons.get(me), fingerprint, fatal=me in fatal))

    return {
        "consent": round_of({}),
        "one": round_of({2: "no memory"}),
        "two": round_of({2: "late", 1: "early"}),
        "all": round_of({0: "a", 1: "b", 2: "c"}),
        "fatal": round_of({0: "mild", 1: "mild", 2: "fatal"}, fatal=(2,)),
        "two fatal": round_of({0: "mild", 1: "fatal", 2: "fatal too"}, fatal=(1, 2)),
        "a fatal flag without a reason": round_of({}, fatal=(0, 1, 2)),
        "odd text": round_of({1: "line 1\nline 2: ü\t%s {0}"}),
        "empty text": round_of({1: ""}),
        "same": round_of({}, fingerprint=2**62 - 1),
        "different": round_of({}, fingerprint=7 if me == 1 else 5),
        "far apart": round_of({}, fingerprint=2**62 - 1 if me == 2 else 0),
        "objection and difference": round_of({1: "mine"}, fingerprint=me),
        "afterwards": round_of({}),
    }


def test_who_objects() -> None:
    answers = on_ranks(case_agreements, RANKS)
    different = "sleep: ranks want different things (fingerprints 5 to 7)"
    for rank, answer in enumerate(answers):
        assert answer == {
            "consent": None,
            "one": [2, "no memory", False],
            "two": [1, "early", False],
            "all": [0, "a", False],
            "fatal": [2, "fatal", True],
            "two fatal": [1, "fatal", True],
            "a fatal flag without a reason": None,
            "odd text": [1, "line 1\nline 2: ü\t%s {0}", False],
            "empty text": [1, "", False],
            "same": None,
            "different": [rank, different, True],
            "far apart": [rank, f"sleep: ranks want different things (fingerprints 0 to {2**62 - 1})", True],
            "objection and difference": [1, "mine", False],
            "afterwards": None,
        }


def test_an_objection_reads_as_a_sentence() -> None:
    assert str(Objection(3, "no memory")) == "rank 3: no memory"


def case_exchanges() -> dict[str, Any]:
    control = Control(PATIENT_S)
    me = control.rank
    before = control.sequence
    return {
        "any": [control.any(flag, "device memory") for flag in (False, me == 1, True)],
        "shared": [control.share({"plan": me, "none": None}), control.share(f"of {me}", source=2)],
        "shared none": control.share(None if me == 0 else "not asked"),
        "union": control.union(["b", f"own {me}"] + ["a"] * (me == 2)),
        "nothing": control.union([]),
        "agreements": control.sequence - before,
    }


def test_exchanges_are_alike_on_all_ranks() -> None:
    for answer in on_ranks(case_exchanges, RANKS):
        assert answer == {
            "any": [False, True, True],
            "shared": [{"plan": 0, "none": None}, "of 2"],
            "shared none": None,
            "union": ["a", "b", "own 0", "own 1", "own 2"],
            "nothing": [],
            "agreements": 3,
        }


def case_nobody_hurries_ahead() -> tuple[float, float]:
    """Rank 1 comes late; when each rank came to the agreement and left it, by the clock of the machine."""
    control = Control(PATIENT_S)
    control.agree("start")
    if control.rank == 1:
        time.sleep(0.4)
    came = time.monotonic()
    control.agree("end")
    return came, time.monotonic()


def test_an_agreement_waits_for_all() -> None:
    came, left = zip(*on_ranks(case_nobody_hurries_ahead, RANKS), strict=True)
    assert came[1] == max(came)
    assert min(left) >= max(came)


# Alarms: for ranks that wait inside somebody else's collective.


def case_alarm() -> dict[str, Any]:
    control = Control(PATIENT_S)
    seen = {"before": control.alarm()}
    heard: list[str] = []
    rung = threading.Event()

    def listen(text: str) -> None:
        heard.append(text)
        rung.set()

    dist.barrier()
    with control.watch(listen):
        if control.rank == 2:
            control.raise_alarm("the export failed")
            control.raise_alarm("once more")
        rung.wait(5)
        dist.barrier()
        if control.rank == 1:  # follows from the first one
            control.raise_alarm("broken off")
        dist.barrier()
        time.sleep(0.25)
    seen["while"] = control.alarm()
    control.agree("the end of it")
    threads = [thread.name for thread in threading.enumerate()]
    return seen | {"heard": heard, "after": control.alarm(), "watching": "pitstop-watch" in threads}


def test_the_first_alarm_counts_until_the_next_agreement() -> None:
    alarm = "rank 2: the export failed"
    for answer in on_ranks(case_alarm, RANKS):
        assert answer == {
            "before": None,
            "while": alarm,
            "heard": [alarm],
            "after": None,
            "watching": False,
        }


def case_quiet_watch() -> tuple[list[str], float]:
    control = Control(PATIENT_S)
    heard: list[str] = []
    started = time.monotonic()
    with control.watch(heard.append):
        pass
    seconds = time.monotonic() - started
    control.agree("the end")
    return heard, seconds


def test_a_watch_without_an_alarm_ends_at_once() -> None:
    for heard, seconds in on_ranks(case_quiet_watch, RANKS):
        assert heard == []
        assert seconds < LOAD_S


# Meetings, and what ranks note of themselves.


def case_meeting() -> dict[str, Any]:
    control = Control(PATIENT_S)
    if control.rank == 2:
        time.sleep(0.3)
    started = time.monotonic()
    control.meet("opening", [0, 2] if control.rank != 1 else [1])
    seconds = time.monotonic() - started
    control.agree("all came")
    notes: list[str] = []
    outcome = ""

    def wait_in_vain() -> None:
        nonlocal outcome
        try:
            control.meet("closing", [0, 1, 2])
        except SwitchError as error:
            outcome = str(error)

    if control.rank != 1:
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        while "0" in control.not_come("closing", [0, 2]):
            time.sleep(0.01)
        notes.append(control.not_come("closing", [0, 1, 2]))
    control.agree("given up")
    if control.rank != 1:
        waiting.join(20)
    control.agree("all gave up")
    return {"seconds": seconds, "absent": notes, "outcome": outcome}


def test_a_meeting_waits_for_its_ranks_and_for_no_others_until_it_is_given_up() -> None:
    first, second, late = on_ranks(case_meeting, RANKS)
    assert first["seconds"] > 0.1
    assert max(second["seconds"], late["seconds"]) < 0.1 + LOAD_S
    for waited in (first, late):
        assert waited["outcome"] == "closing: given up long ago"
    assert "rank 1" in first["absent"][0]
    assert second["absent"] == []


def case_notes() -> list[str]:
    control = Control(PATIENT_S)
    control.note(f"sleep/saver.pause of {control.rank}")
    said = []
    for beside in ("", "sleep/group.release", ""):
        control.note(beside, beside=True)
        control.agree("noted")
        said.append(control._shown([1]))
        control.agree("read")
    return [*said, control._lost("sleep", RuntimeError("why"))]


def test_a_rank_is_last_seen_where_it_is_and_beside_that() -> None:
    at = "last seen in sleep/saver.pause of 1"
    for rank, (*said, lost) in enumerate(on_ranks(case_notes, RANKS)):
        assert said == [
            f"rank 1 ({at})",
            f"rank 1 ({at}, beside that in sleep/group.release)",
            f"rank 1 ({at})",
        ]
        assert lost.startswith(
            f"rank {rank} (last in sleep/saver.pause of {rank}) waited for all ranks (sleep)"
        )


def case_found_missing() -> list[bool]:
    """Whether a rank that is not yet in the agreement sees that others have given it up."""
    module._GRACE_S, module._LOOK_S = 3.0, 0.1
    control = Control(HASTY_S)
    control.agree("start")
    before = control.is_lost()
    if control.rank == 2:
        deadline = time.monotonic() + 20
        while not control.is_lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = control.is_lost()
    else:
        seen = True
    with pytest.raises(RankFailedError):
        control.agree("sleep")
    return [before, seen]


def test_a_rank_sees_that_others_wait_for_it_in_vain() -> None:
    assert on_ranks(case_found_missing, RANKS) == [[False, True]] * RANKS


# Ranks that are lost.


def case_lost(way: str, what: str) -> tuple[float, str] | None:
    """How long a rank waits, and what it hears, if rank 2 dies, stalls, or is late for the same call."""
    module._GRACE_S, module._LOOK_S = LOAD_S if way == "late" else 1.0, 0.1
    control = Control(PATIENT_S if way == "dies" else HASTY_S)
    calls = {
        "agree": lambda: control.agree("sleep"),
        "any": lambda: control.any(False, "device memory"),
        "share": lambda: control.share("plan", source=2),
        "union": lambda: control.union([]),
    }
    control.agree("start")
    if control.rank == 2:
        if way == "dies":
            return None
        time.sleep(HASTY_S + (1.5 if way == "stalls" else 0.3))
        if way == "stalls":
            return None
    started = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        calls[what]()
    return time.monotonic() - started, str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("agree", "sleep"),
        ("any", "device memory"),
        ("share", "sharing a decision"),
        ("union", "comparing communicators"),
    ],
)
def test_a_rank_that_died_is_named_by_all_before_their_time_limit(what: str, said: str) -> None:
    *living, _ = on_ranks(case_lost, RANKS, "dies", what)
    for rank, (seconds, text) in enumerate(living):
        assert seconds < PATIENT_S
        assert text.startswith(f"rank {rank} waited for all ranks ({said}) for at most {PATIENT_S:g} s; ")
        assert "; missing: rank 2. Cause: " in text
        assert text.endswith("Restart the job from its last checkpoint.")


def test_a_rank_that_stalls_is_named_when_time_is_up() -> None:
    *living, _ = on_ranks(case_lost, RANKS, "stalls", "agree")
    for seconds, text in living:
        assert HASTY_S <= seconds < HASTY_S + 2.0 + LOAD_S
        assert f"for at most {HASTY_S:g} s; missing: rank 2. Cause: " in text


def test_a_rank_that_comes_too_late_is_told_apart_from_a_dead_one() -> None:
    for _, text in on_ranks(case_lost, RANKS, "late", "agree"):
        assert "; all ranks are alive, but not at the same point. Cause: " in text


def case_many_lost() -> str:
    control = Control(HASTY_S)
    control.size = 12  # as if nine more ranks had been there
    module._GRACE_S = 0.3
    return str(control._lost("sleep", RuntimeError("first line\nsecond line")))


def test_many_lost_ranks_are_counted() -> None:
    (text,) = on_ranks(case_many_lost, 1)
    assert "missing: rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more. Cause: first line. Restart" in text


def case_close() -> int:
    control = Control(PATIENT_S)
    before = len(dist.distributed_c10d._world.pg_map)
    control.close()
    control.close()
    after = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    control.close()
    return before - after


def test_closing_twice_or_after_torch_is_harmless() -> None:
    assert on_ranks(case_close, 2) == [1, 1]
