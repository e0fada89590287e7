"""Which channel cap a plan gives to which communicator."""

from __future__ import annotations

from pitstop.inventory.kinds import group_kinds
from pitstop.inventory.lanes import is_bulk
from pitstop.inventory.topology import Topology
from pitstop.plan import Plan
from pitstop.scenario import Scenario

SAME_GPU_CHANNELS = 32
"""Channels that ranks on one GPU need: they take turns on it, and what a turn moves grows with the channels.

Between two of them 16 channels carry half of what NCCL's own 64 do, and 32 carry all of it (all-reduce of 128 MiB, four
ranks on each of two H200, NCCL 2.30.7: 0.51 and 0.999; evidence/README.md), while ranks on several GPUs have channels
to spare.
"""


def cap_of(cold: int | None, hot: int | None, *, bulk: bool, same_gpu: bool) -> int | None:
    """Most channels of a communicator that Pitstop manages; None leaves the choice to the library.

    Args:
        cold: ``cold_max_ctas`` of the plan.
        hot: ``hot_max_ctas`` of the plan.
        bulk: whether it carries more than a few numbers.
        same_gpu: whether all its ranks share one GPU.
    """
    if not bulk:
        return cold
    if hot is None or not same_gpu:
        return hot
    return max(hot, SAME_GPU_CHANNELS)


def channel_caps(scenario: Scenario, plan: Plan) -> dict[str, int]:
    """Most channels by Megatron's configuration name, in the order of creation; names without a cap are left out.

    For a trainer whose groups Pitstop does not manage: there, nobody else gives communicators the caps of the plan.
    Groups do not share communicators then, so each kind of group is capped by what it carries itself.

    Raises:
        InvalidScenarioError: Megatron would refuse the layout.
    """
    caps = {False: plan.cold_max_ctas, True: plan.hot_max_ctas}
    bulk: dict[str, bool] = {}
    for kind in group_kinds(Topology.of(scenario)):
        if kind.config_name is not None:
            # Several kinds may have one name: what one of them carries decides for all.
            bulk[kind.config_name] = bulk.get(kind.config_name, False) or is_bulk(kind.name)
    return {name: cap for name, carries_bulk in bulk.items() if (cap := caps[carries_bulk]) is not None}
