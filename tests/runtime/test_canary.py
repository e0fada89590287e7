"""The canary catches what can go wrong with a collective, says where, and does not wait for long.

In process over communicators that are made up; ``case_`` functions run on ranks, over gloo.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import on_ranks

from pitstop_runtime.canary import Canary
from pitstop_runtime.errors import CanaryError
from pitstop_runtime.groups import Communicator, Library, registry

Contributions = list[torch.Tensor]
SIZES = range(2, 9)


@dataclass
class Work:
    """A collective that has ended, well or not, or that never ends."""

    done: bool = True
    error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done

    def wait(self, *_: object) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class MadeUp:
    """One member of a communicator whose collective turns what it sends into what the test says."""

    size: int
    deliver: Callable[[torch.Tensor], torch.Tensor]
    rank: int = 0
    work: Work = field(default_factory=Work)
    name: str = "tp"
    library: Library = Library.GLOO

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def inner(self) -> MadeUp:
        return self

    def __str__(self) -> str:
        return f"communicator {self.name} over ranks {list(self.ranks)}"

    def allreduce(self, tensors: list[torch.Tensor], *_: object) -> Work:
        (tensor,) = tensors
        tensor.copy_(self.deliver(tensor.clone()))
        return self.work


def check(*communicators: Any, timeout_s: float = 5.0) -> None:
    canary = Canary(timeout_s)
    canary.prepare(communicators)
    canary.run(communicators)


def sent_by(rank: int, size: int) -> torch.Tensor:
    """What a member sends."""
    sent: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    with pytest.raises(CanaryError):  # what one sends alone is no sum
        check(MadeUp(size, keep, rank))
    return sent[0]


@pytest.fixture(scope="module")
def sent() -> dict[int, Contributions]:
    """What the members send, by the size of the group."""
    return {size: [sent_by(rank, size) for rank in range(size)] for size in SIZES}


def is_caught(size: int, received: Contributions) -> bool:
    total = torch.stack(received).sum(0)
    try:
        check(MadeUp(size, lambda _: total))
    except CanaryError:
        return True
    return False


@pytest.mark.parametrize("size", SIZES)
def test_the_right_sum_passes_on_every_member(size: int, sent: dict[int, Contributions]) -> None:
    total = torch.stack(sent[size]).sum(0)
    for rank in range(size):
        check(MadeUp(size, lambda _: total, rank))


@pytest.mark.parametrize("size", SIZES)
def test_a_lost_or_a_repeated_contribution_is_caught(size: int, sent: dict[int, Contributions]) -> None:
    members = sent[size]
    for one in range(size):
        assert is_caught(size, [m for i, m in enumerate(members) if i != one] or [members[one] * 0])
        assert is_caught(size, [*members, members[one]])
        for other in range(size):
            if other != one:  # its message came twice, instead of that of another
                assert is_caught(size, [members[other] if i == one else m for i, m in enumerate(members)])


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_wrong_mixture_is_caught(size: int, sent: dict[int, Contributions]) -> None:
    mixtures = itertools.combinations_with_replacement(range(size), size)
    passed = [m for m in mixtures if not is_caught(size, [sent[size][i] for i in m])]
    assert passed == [tuple(range(size))]


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_a_stranger_is_caught(size: int, sent: dict[int, Contributions]) -> None:
    for stranger in range(size, 20):
        for one in range(size):
            mixed = [sent_by(stranger, 20) if i == one else m for i, m in enumerate(sent[size])]
            assert is_caught(size, mixed)


@pytest.mark.parametrize("size", SIZES)
def test_numbers_that_trade_places_are_caught(size: int, sent: dict[int, Contributions]) -> None:
    total = torch.stack(sent[size]).sum(0)
    for i, j in itertools.combinations(range(len(total)), 2):
        swapped = total.clone()
        swapped[i], swapped[j] = total[j], total[i]
        if not swapped.equal(total):
            with pytest.raises(CanaryError):
                check(MadeUp(size, lambda _, wrong=swapped: wrong))
    assert len(set(total.tolist())) > 2


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_damaged_sum_is_caught(wrong: float, sent: dict[int, Contributions]) -> None:
    total = torch.stack(sent[4]).sum(0)
    for i in range(len(total)):
        damaged = total.clone()
        damaged[i] = wrong
        with pytest.raises(CanaryError, match=r"tp over ranks \[0, 1, 2, 3\]: sums \[.*\] instead of \["):
            check(MadeUp(4, lambda _, wrong=damaged: wrong))


def test_an_old_result_is_no_answer(sent: dict[int, Contributions]) -> None:
    """The buffer is the same each time: a collective that does nothing must not find the last sum in it."""
    total = torch.stack(sent[2]).sum(0)
    member: Any = MadeUp(2, lambda _: total)
    canary = Canary(5.0)
    canary.prepare([member])
    canary.run([member])
    member.deliver = lambda mine: mine
    with pytest.raises(CanaryError, match="sums"):
        canary.run([member])


def failing(name: str, **work: Any) -> MadeUp:
    return MadeUp(2, lambda mine: mine, name=name, work=Work(**work))


def test_silence_is_a_failure_within_the_time_limit(sent: dict[int, Contributions]) -> None:
    total = torch.stack(sent[2]).sum(0)
    well = MadeUp(2, lambda _: total, name="dp")
    started = time.monotonic()
    with pytest.raises(CanaryError, match=r"^communicator pp over ranks \[0, 1\]: no answer within 1 s$"):
        check(well, failing("pp", done=False), failing("ep", done=False), timeout_s=1.0)
    assert 1.0 <= time.monotonic() - started < 1.9, "one limit for all, not one for each"


def test_silence_is_not_waited_for_if_a_rank_is_missing() -> None:
    canary = Canary(60.0, is_vain=lambda: True)
    silent: Any = failing("pp", done=False)
    canary.prepare([silent])
    started = time.monotonic()
    with pytest.raises(
        CanaryError, match=r"pp over ranks .*: no answer, and another rank has found one missing"
    ):
        canary.run([silent])
    assert time.monotonic() - started < 20


def test_an_error_is_passed_on_with_its_first_line() -> None:
    error = RuntimeError("NCCL error: unhandled system error\nstack trace\n...")
    with pytest.raises(
        CanaryError, match=r"^communicator pp over ranks \[0, 1\]: NCCL error: unhandled system error$"
    ) as caught:
        check(failing("pp", error=error))
    assert caught.value.__cause__ is error


def test_a_collective_that_does_not_even_start_is_named() -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Bad address")

    with pytest.raises(CanaryError, match=r"^communicator dp over ranks \[0, 1, 2\]: Bad address$"):
        check(MadeUp(3, refuse, name="dp"))


def test_nothing_to_check_is_fine() -> None:
    check()


# Over real communicators.


def communicators() -> list[Communicator]:
    """Of a group of all ranks and of one without rank 0."""
    size = dist.get_world_size()
    for ranks, kind in (
        (range(size), "TENSOR_MODEL_PARALLEL_GROUP"),
        (range(1, size), "DATA_PARALLEL_GROUP"),
    ):
        dist.new_group(list(ranks), group_desc=kind)
    return registry.communicators()


def run(canary: Canary, found: list[Communicator]) -> str:
    started = time.monotonic()
    try:
        canary.run(found)
    except CanaryError as error:
        assert time.monotonic() - started < canary.timeout_s + 5.0
        return str(error)
    return "well"


def case_well() -> list[str]:
    found = communicators()
    canary = Canary(10.0)
    canary.prepare(found)
    said = [run(canary, found) for _ in range(3)]
    for each in found:
        each.release()
        each.build()
    canary.prepare(found)
    return [*said, run(canary, found), run(canary, found[:1]), str(len(found))]


def test_living_and_rebuilt_communicators_pass() -> None:
    first, *others = on_ranks(case_well, 3)
    assert first == ["well"] * 5 + ["2"]
    assert others == [["well"] * 5 + ["3"]] * 2


def case_two_claim_to_be_one() -> str:
    found = communicators()
    canary = Canary(10.0)
    canary.prepare(found)
    if dist.get_rank() == 2:
        found[-1].rank -= 1
    return run(canary, found)


def test_a_duplicate_is_caught_by_the_members_and_by_nobody_else() -> None:
    outside, *members = on_ranks(case_two_claim_to_be_one, 3)
    assert outside == "well"
    for text in members:
        assert text.startswith("communicator DATA_PARALLEL_GROUP over ranks [1, 2]: sums [2.0, 2.0")


def case_absent() -> str:
    found = communicators()
    canary = Canary(0.4)
    canary.prepare(found)
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(1.0)
        return "absent"
    return run(canary, found[1:])


def test_an_absent_member_is_a_failure_of_the_communicator() -> None:
    *present, _ = on_ranks(case_absent, 3)
    text = "communicator TENSOR_MODEL_PARALLEL_GROUP over ranks [0, 1, 2]: no answer within 0.4 s"
    assert present == [text, text]


def case_broken_off() -> str:
    found = communicators()
    canary = Canary(5.0)
    canary.prepare(found)
    dist.barrier()  # who breaks it off at once closes the door on one that is still making it
    found[1].abort()
    return run(canary, found[1:2])


def test_a_communicator_that_was_broken_off_is_named() -> None:
    for text in on_ranks(case_broken_off, 2):
        assert text.startswith("communicator TENSOR_MODEL_PARALLEL_GROUP over ranks [0, 1]: ")
        assert "broken" in text
