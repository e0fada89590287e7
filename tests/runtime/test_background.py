"""An action in a thread: its end, its error, its time limit, its device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pitstop_runtime.background import Background, on_current_device
from pitstop_runtime.errors import SwitchError


def idle() -> str:
    return "something"


def test_it_begins_at_once_and_join_waits_for_its_end() -> None:
    begun, leave, ended = threading.Event(), threading.Event(), []

    def action() -> None:
        begun.set()
        leave.wait(10)
        ended.append(threading.current_thread().name)

    job = Background(action, 10, idle)
    assert begun.wait(10)
    assert not ended
    threading.Timer(0.05, leave.set).start()
    job.join()
    assert ended == ["pitstop-background"]
    job.join()


def test_join_raises_what_the_action_raised() -> None:
    failure = ZeroDivisionError("in the thread")

    def action() -> None:
        raise failure

    job = Background(action, 10, idle)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            job.join()
        assert caught.value is failure


def test_an_exit_of_the_thread_is_no_silence() -> None:
    def action() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Background(action, 10, idle).join()


@pytest.fixture
def stuck() -> Iterator[Callable[[], None]]:
    """An action that ends with the test."""
    end = threading.Event()
    yield end.wait  # type: ignore[misc]
    end.set()


def test_the_time_limit_counts_from_the_start_and_names_what_is_under_way(stuck: Callable[[], None]) -> None:
    busy_with = ["releasing communicator A"]
    job = Background(stuck, 2.0, lambda: busy_with[0])
    time.sleep(1.5)
    busy_with[0] = "releasing communicator B"
    started = time.monotonic()
    with pytest.raises(SwitchError, match=r"^releasing communicator B did not end within 2 s$"):
        job.join()
    assert time.monotonic() - started < 1.9
    started = time.monotonic()
    with pytest.raises(SwitchError, match="did not end"):
        job.join()
    assert time.monotonic() - started < 1.0


def test_the_end_counts_even_if_join_comes_late() -> None:
    job = Background(lambda: None, 0.05, idle)
    time.sleep(0.1)
    job.join()


def test_what_is_in_vain_is_given_up_before_the_time_limit(stuck: Callable[[], None]) -> None:
    started = time.monotonic()
    with pytest.raises(SwitchError, match=r"^nothing was given up: another rank has found one missing$"):
        Background(stuck, 60, lambda: "nothing", is_vain=lambda: True).join()
    assert time.monotonic() - started < 20


def test_what_has_ended_is_not_in_vain() -> None:
    Background(lambda: None, 60, idle, is_vain=lambda: True).join()


def test_a_stuck_action_does_not_hold_the_process_up(stuck: Callable[[], None]) -> None:
    job = Background(stuck, 0.01, idle)
    with pytest.raises(SwitchError):
        job.join()
    (thread,) = [each for each in threading.enumerate() if each.name == "pitstop-background"][-1:]
    assert thread.daemon


def test_threads_work_on_the_device_of_their_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {"device": 3}
    chosen: list[tuple[str, int]] = []

    def set_device(device: int) -> None:
        chosen.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current["device"])
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    Background(lambda: chosen.append(("the action", 0)), 10, idle).join()
    assert chosen == [("pitstop-background", 3), ("the action", 0)]
    action = on_current_device(lambda: "result")
    current["device"] = 5  # of the caller, not of the maker
    assert action() == "result"
    assert chosen[-1][1] == 3


def test_without_a_device_the_action_is_left_as_it_is() -> None:
    assert on_current_device(idle) is idle
