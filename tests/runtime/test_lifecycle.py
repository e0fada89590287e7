"""The life cycle: every state and entry point, overlap, failure. No torch in here."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import product

import pytest

from pitstop_runtime.errors import ForbiddenTransitionError, SwitchError
from pitstop_runtime.lifecycle import Entry, Lifecycle, State

WORK = ("train", "save", "eval")
PAUSED = ("paused-live", "paused-suspended", "paused-released")

# From each state: what may be called, and the states in which it may end.
ALLOWED: dict[str, dict[str, set[str]]] = {
    "active": {
        "train": {"active"},
        "save": {"active"},
        "eval": {"active"},
        "sleep": set(PAUSED),
        "update_weights": {"active"},
        "shutdown": {"closed"},
    },
    **{
        state: {"update_weights": set(PAUSED), "wake_up": {"active"}, "shutdown": {"closed"}}
        for state in PAUSED
    },
    "failed": {"shutdown": {"closed"}},
    "closed": {"shutdown": {"closed"}},
}
# What each refusal tells the caller to do.
REMEDIES = {
    ("active", "wake_up"): "call sleep() first",
    **dict.fromkeys(product(PAUSED, WORK), "Call wake_up() first"),
    **{(state, "sleep"): "call wake_up() before the next sleep()" for state in PAUSED},
    **{("failed", entry): "Call shutdown()" for entry in Entry},
    **{("closed", entry): "make a new one" for entry in Entry},
}
PAIRS = list(product(State, Entry))


def in_state(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    if state is State.FAILED:
        lifecycle.fail("a rank is lost")
    lifecycle.state = state
    return lifecycle


def test_the_table_covers_everything() -> None:
    assert set(ALLOWED) == set(State)
    assert {entry for allowed in ALLOWED.values() for entry in allowed} == set(Entry)
    assert {state for state in State if state.is_paused} == set(PAUSED)


@pytest.mark.parametrize(("state", "entry"), PAIRS)
def test_every_entry_from_every_state(state: State, entry: Entry) -> None:
    lifecycle = in_state(state)
    if entry in ALLOWED[state]:
        with lifecycle.entry(entry):
            pass
    else:
        with (
            pytest.raises(ForbiddenTransitionError) as caught,
            lifecycle.entry(entry),
        ):
            pytest.fail("the body must not run")
        text = str(caught.value)
        assert text.startswith(f"{entry}() is not allowed now: ")
        assert REMEDIES[state, entry] in text
        assert text.endswith(".")
    assert lifecycle.state is state, "announcing alone moves nothing"
    with lifecycle.entry(Entry.SHUTDOWN):
        pass  # a refusal holds nothing


@pytest.mark.parametrize(("state", "entry"), [pair for pair in PAIRS if pair[1] in ALLOWED[pair[0]]])
def test_where_an_entry_may_lead(state: State, entry: Entry) -> None:
    for target in State:
        lifecycle = in_state(state)
        with lifecycle.entry(entry):
            if target in ALLOWED[state][entry]:
                lifecycle.become(target)
                assert lifecycle.state is target
            else:
                with pytest.raises(SwitchError, match=f"{entry} may not lead from {state} to {target}"):
                    lifecycle.become(target)
                assert lifecycle.state is state


def test_nothing_becomes_without_an_entry() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(SwitchError, match="None may not lead from active to paused-live"):
        lifecycle.become(State.PAUSED_LIVE)
    assert lifecycle.state is State.ACTIVE


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State.PAUSED_LIVE, "the trainer's memory is paused"),
        (State.PAUSED_RELEASED, "the trainer's memory is paused"),
        (State.CLOSED, "the state is closed. "),
    ],
)
def test_a_refusal_names_the_state(state: State, said: str) -> None:
    with pytest.raises(ForbiddenTransitionError) as caught, in_state(state).entry(Entry.TRAIN):
        pass
    assert str(state) in str(caught.value)
    assert said in str(caught.value)
    assert ("memory" in str(caught.value)) == state.is_paused


@pytest.mark.parametrize("inner", Entry)
def test_entries_do_not_nest(inner: Entry) -> None:
    lifecycle = Lifecycle()
    with lifecycle.entry(Entry.TRAIN):
        with (
            pytest.raises(
                ForbiddenTransitionError, match=rf"{inner}\(\) was called while train\(\) is under way"
            ),
            lifecycle.entry(inner),
        ):
            pass
        lifecycle.become(State.ACTIVE)  # the outer one still holds
    with lifecycle.entry(Entry.SAVE):
        pass


def test_an_exception_of_the_body_passes_and_ends_the_entry() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(ZeroDivisionError), lifecycle.entry(Entry.TRAIN):
        raise ZeroDivisionError
    assert lifecycle.state is State.ACTIVE
    with lifecycle.entry(Entry.SLEEP):
        lifecycle.become(State.PAUSED_LIVE)


def test_a_second_thread_is_refused_while_the_first_is_inside() -> None:
    lifecycle = Lifecycle()
    inside, leave = threading.Event(), threading.Event()

    def save() -> None:
        with lifecycle.entry(Entry.SAVE):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=save)
    thread.start()
    assert inside.wait(10)
    with (
        pytest.raises(ForbiddenTransitionError, match=r"sleep\(\) was called while save\(\) is under way"),
        lifecycle.entry(Entry.SLEEP),
    ):
        pass
    leave.set()
    thread.join()
    with lifecycle.entry(Entry.SLEEP):
        pass


def test_of_many_threads_one_gets_in() -> None:
    lifecycle = Lifecycle()
    start, done = threading.Barrier(8), threading.Barrier(8)
    outcomes: list[str] = []

    def sleep() -> None:
        start.wait()
        try:
            with lifecycle.entry(Entry.SLEEP):
                outcomes.append("in")
                done.wait(10)
        except ForbiddenTransitionError:
            outcomes.append("refused")
            done.wait(10)

    threads = [threading.Thread(target=sleep) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["in", *["refused"] * 7]


@pytest.mark.parametrize("state", State)
def test_failing_is_possible_from_anywhere_and_keeps_the_first_reason(state: State) -> None:
    lifecycle = in_state(state)
    first = lifecycle.failure or "rank 3 is lost"
    lifecycle.fail("rank 3 is lost")
    lifecycle.fail("and so is rank 4")
    assert (lifecycle.state, lifecycle.failure) == (State.FAILED, first)
    with pytest.raises(ForbiddenTransitionError) as caught, lifecycle.entry(Entry.WAKE_UP):
        pass
    assert first in str(caught.value)
    assert "restart from a checkpoint" in str(caught.value)


def test_failing_inside_an_entry_leaves_only_shutdown() -> None:
    lifecycle = Lifecycle()
    with lifecycle.entry(Entry.SLEEP):
        lifecycle.fail("out of memory")
        with pytest.raises(SwitchError, match="sleep may not lead from failed to paused-live"):
            lifecycle.become(State.PAUSED_LIVE)
    assert lifecycle.state is State.FAILED
    for entry in Entry:
        if entry is not Entry.SHUTDOWN:
            with pytest.raises(ForbiddenTransitionError, match="out of memory"), lifecycle.entry(entry):
                pass
    for _ in range(2):
        with lifecycle.entry(Entry.SHUTDOWN):
            lifecycle.become(State.CLOSED)


def test_import_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pitstop_runtime.lifecycle import Lifecycle; print(Lifecycle().state)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "active"
