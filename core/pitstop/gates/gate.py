"""What a gate is: which plans it guards, what it looks at, what it says. And the groups of plans guarded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pitstop.gates.facts import Facts
from pitstop.plan import Backup, Disposition, Export, Plan


class GateVerdict(StrEnum):
    """What a gate says of the facts."""

    OPEN = "open"
    CLOSED = "closed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """A gate's answer: the verdict, the value seen in words, and what to do (empty if the gate is open)."""

    verdict: GateVerdict
    value: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition under which a plan may be carried out.

    ``code`` never changes its meaning. ``why`` says what goes wrong otherwise, ``source`` where that is known
    from. A gate that is ``required`` must be known to be open before a trainer leaves the baseline. One that
    does not ``refuse`` warns only: the plan is safe, but does not do what one would expect of it.
    """

    code: str
    title: str
    why: str
    source: str
    applies: Callable[[Plan], bool]
    check: Callable[[Facts], Finding]
    required: bool = True
    refuses: bool = True


def found_open(value: str) -> Finding:
    """The condition holds."""
    return Finding(GateVerdict.OPEN, value)


def found_closed(value: str, remedy: str) -> Finding:
    """The condition does not hold."""
    return Finding(GateVerdict.CLOSED, value, remedy)


def not_known(value: str = "not known", remedy: str = "Checked in the trainer.") -> Finding:
    """The facts do not say whether the condition holds."""
    return Finding(GateVerdict.UNKNOWN, value, remedy)


def must_be(
    wanted: bool, fact: Callable[[Facts], bool | None], *, good: str, bad: str, remedy: str
) -> Callable[[Facts], Finding]:
    """The check that a fact is true (or false, if not ``wanted``); ``good`` and ``bad`` put it in words."""

    def check(facts: Facts) -> Finding:
        value = fact(facts)
        if value is None:
            return not_known()
        return found_open(good) if value is wanted else found_closed(bad, remedy)

    return check


def release_of(version: str | None) -> tuple[int, ...] | None:
    """The release numbers of a version, without suffixes; None if there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)+)", (version or "").strip())
    return tuple(int(part) for part in match[1].split(".")) if match else None


def number_of(value: str | None, default: int) -> int:
    """An integer setting as NCCL reads it: the default if unset or not a number."""
    try:
        return int((value or "").strip(), 0)
    except ValueError:
        return default


def any_plan(plan: Plan) -> bool:
    """Every plan, the baseline too: the condition makes even that impossible."""
    del plan
    return True


def survives(plan: Plan) -> bool:
    """Plans under which a communicator lives through the pause of the trainer's memory."""
    return plan.training is not Disposition.DESTROY or plan.export is Export.COMMUNICATOR


def copies(plan: Plan) -> bool:
    """Plans under which ranks copy weights from each other's GPUs."""
    return plan.export is Export.COPIES


def suspends(plan: Plan) -> bool:
    """Plans that suspend communicators."""
    return plan.training is Disposition.SUSPEND


def keeps(plan: Plan) -> bool:
    """Plans under which a communicator lives through the pause with its memory."""
    return survives(plan) and not suspends(plan)


def destroys(plan: Plan) -> bool:
    """Plans that destroy communicators in each switch, at whatever moment."""
    return plan.training in (Disposition.DESTROY, Disposition.DESTROY_AFTER_SYNC)


def retains(plan: Plan) -> bool:
    """Plans that keep the saver's pinned host backups."""
    return plan.backup is Backup.RETAIN


def survives_or_retains(plan: Plan) -> bool:
    """Plans that ask more of the saver than to pause and to resume."""
    return survives(plan) or retains(plan)


def registered_at_risk(plan: Plan) -> bool:
    """Plans under which the saver pauses memory while a communicator may hold a registration of it."""
    return survives(plan) or plan.background_release


def gains_by_groups_only(plan: Plan) -> bool:
    """Plans whose whole gain comes from communicators."""
    return survives(plan) and not retains(plan)


def keeps_unchecked(plan: Plan) -> bool:
    """Plans that keep communicators and do not check them after the pause."""
    return survives(plan) and not plan.canary


def departs(plan: Plan) -> bool:
    """Plans that do more than destroy and rebuild the trainer's own groups, as the baseline does."""
    return (
        survives_or_retains(plan)
        or plan.share
        or plan.cold_max_ctas is not None
        or plan.hot_max_ctas is not None
        or plan.export is not Export.TRAINING
        or plan.background_release
    )
