"""A plan: what happens to each communicator, to the cooldown and to the host backups during a switch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field

from pitstop.errors import FieldProblem, InvalidPlanError, show_value, use_one_of
from pitstop.scenario import StrictModel

PLAN_SCHEMA_VERSION: Final = 1

Channels = Annotated[int, Field(ge=1, le=64)]


class Disposition(StrEnum):
    """What a switch does to a communicator."""

    DESTROY = "destroy"
    DESTROY_AFTER_SYNC = "destroy-after-sync"
    KEEP = "keep"
    SUSPEND = "suspend"


class Cooldown(StrEnum):
    """How the wait for ports after a destroy is paid."""

    FIXED = "fixed"
    DEADLINE = "deadline"


class Backup(StrEnum):
    """What the saver does with its pinned host copy after resume."""

    REALLOCATE = "reallocate"
    RETAIN = "retain"


class Export(StrEnum):
    """What gathers the weights while the trainer sleeps.

    ``training``: the training communicators. ``communicator``: one more per export rank set, capped and kept alive.
    ``copies``: no communicator; the ranks map each other's buffers and copy (one node).
    """

    TRAINING = "training"
    COMMUNICATOR = "communicator"
    COPIES = "copies"


class Role(StrEnum):
    """Groups of communicators that a plan treats alike."""

    EXPORT = "export"
    HOT = "hot"
    COLD = "cold"


class Plan(StrictModel):
    """One way to switch.

    ``training`` applies to every communicator that training uses. A channel cap that is not given leaves the choice
    to the library.
    """

    schema_version: Literal[1] = PLAN_SCHEMA_VERSION
    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    summary: str = Field(default="", max_length=500)
    training: Disposition = Field(description="what happens to the training communicators")
    share: bool = Field(
        default=False, description="groups with equal rank set and options share one communicator"
    )
    cold_max_ctas: Channels | None = Field(
        default=None, description="channel cap of communicators off the hot path"
    )
    hot_max_ctas: Channels | None = Field(
        default=None, description="channel cap of communicators on the hot path; a low one slows training"
    )
    export: Export = Field(default=Export.TRAINING, description="what gathers the weights")
    export_max_ctas: Channels = Field(default=4, description="channel cap of each export communicator")
    background_release: bool = Field(
        default=False, description="release beside the saver's copy, joined before hand-over"
    )
    cooldown: Cooldown = Field(
        default=Cooldown.DEADLINE, description="fixed wait, or a deadline paid only if too early"
    )
    backup: Backup = Field(
        default=Backup.REALLOCATE, description="keep the pinned host backup between switches, or not"
    )
    canary: bool = Field(
        default=False, description="one all-reduce on each kept communicator after the pause"
    )


_NAMED = (
    Plan(
        name="reload",
        summary="destroy and rebuild all groups around each use, fixed cooldown after each: the baseline",
        training=Disposition.DESTROY,
        cooldown=Cooldown.FIXED,
    ),
    Plan(
        name="reload-deferred",
        summary="as reload, but the cooldown is a deadline, paid only if a rebuild comes too early",
        training=Disposition.DESTROY,
    ),
    Plan(
        name="keep-window",
        summary="alive from pause to weight sync, then destroyed, cooldown deferred: the report's plan",
        training=Disposition.DESTROY_AFTER_SYNC,
        canary=True,
    ),
    Plan(
        name="keep",
        summary="alive through the rollout; holds all communicator memory while the engine runs",
        training=Disposition.KEEP,
        canary=True,
    ),
    Plan(
        name="suspend",
        summary="suspended while paused, resumed for the weight sync and for training (NCCL >= 2.29.7)",
        training=Disposition.SUSPEND,
        canary=True,
    ),
    Plan(
        name="lean",
        summary="equal rank sets share one communicator, cold ones capped, all kept; host backups retained",
        training=Disposition.KEEP,
        share=True,
        cold_max_ctas=4,
        backup=Backup.RETAIN,
        canary=True,
    ),
    Plan(
        name="lean-released",
        summary="as lean, but training communicators are released beside the copy; a capped export one stays",
        training=Disposition.DESTROY,
        share=True,
        cold_max_ctas=4,
        export=Export.COMMUNICATOR,
        background_release=True,
        backup=Backup.RETAIN,
        canary=True,
    ),
    Plan(
        name="lean-copies",
        summary="as lean-released, but ranks copy weights from each other's GPUs: no communicator stays",
        training=Disposition.DESTROY,
        share=True,
        cold_max_ctas=4,
        export=Export.COPIES,
        background_release=True,
        backup=Backup.RETAIN,
        canary=True,
    ),
)
NAMED_PLANS: dict[str, Plan] = {plan.name: plan for plan in _NAMED}
BASELINE = NAMED_PLANS["reload"]


def named_plan(name: str) -> Plan:
    """Look a named plan up.

    Raises:
        InvalidPlanError: no plan has this name.
    """
    try:
        return NAMED_PLANS[name]
    except KeyError:
        problem = FieldProblem(
            "plan", show_value(name), "no plan has this name", use_one_of(name, NAMED_PLANS)
        )
        raise InvalidPlanError("unknown plan", [problem]) from None
