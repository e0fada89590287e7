"""Which groups may share one communicator, by what their collectives run beside.

A communicator carries its collectives one after the other. Where Megatron-core lets two groups' collectives
overlap on purpose - gradients reduced beside the backward pass, tokens dispatched beside a shared expert -
one communicator for both would give the same numbers and lose the overlap. So each kind of group has a
**lane**, and groups of different lanes never share. Groups that carry a few numbers once per step, when
nothing else is under way, ride on any lane (``None``).

Source of the overlaps: megatron-core 0.16 and 0.19, ``overlap_grad_reduce`` and ``overlap_param_gather``
(data parallel), context-parallel attention (ring exchange beside attention), ``overlap_p2p_comm``
(pipeline), ``moe_shared_expert_overlap`` and ``overlap_moe_expert_parallel_comm`` (experts).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Lane(StrEnum):
    """Collectives that may be under way at the same time are on different lanes."""

    MODEL = "model"
    GRADIENT = "gradient"
    CONTEXT = "context"
    PIPELINE = "pipeline"
    EXPERT = "expert"
    OWN = "own"  # of a group that Megatron-core does not make: nobody knows what it overlaps with


_ANY_LANE = {
    "MODEL_PARALLEL_GROUP",
    "EMBEDDING_GROUP",
    "POSITION_EMBEDDING_GROUP",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "TENSOR_AND_DATA_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
}
_LANES = {
    "TENSOR_MODEL_PARALLEL_GROUP": Lane.MODEL,
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": Lane.MODEL,
    "CONTEXT_PARALLEL_GROUP": Lane.CONTEXT,
    "PIPELINE_MODEL_PARALLEL_GROUP": Lane.PIPELINE,
    "EXPERT_MODEL_PARALLEL_GROUP": Lane.EXPERT,
    "EXPERT_TENSOR_PARALLEL_GROUP": Lane.EXPERT,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": Lane.EXPERT,
}
# Kinds that carry activations, tokens, gradients or parameters in some layout; all others of Megatron's carry
# a few numbers. ``use`` says which of them a given layout really uses.
_BULK = set(_LANES) - {"TENSOR_AND_CONTEXT_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"}


def lane_of(description: str) -> Lane | None:
    """Lane of a group by Megatron's ``group_desc``; None if it may ride on any lane."""
    if description in _ANY_LANE:
        return None
    if "DATA_PARALLEL_GROUP" in description or "GTP_WEIGHT_REMAT" in description:
        return Lane.GRADIENT
    return _LANES.get(description, Lane.OWN)


def is_bulk(description: str) -> bool:
    """Whether a channel cap on this kind of group could slow training: unknown kinds count as bulk."""
    lane = lane_of(description)
    return lane in (Lane.GRADIENT, Lane.OWN) or description in _BULK


def shared_parts(
    groups: Sequence[T], description: Callable[[T], str], likeness: Callable[[T], Hashable]
) -> list[list[T]]:
    """Groups in sets that may share one communicator each, by the order of their first ones.

    Args:
        groups: in the order of creation, equal on all ranks.
        description: Megatron's ``group_desc`` of a group.
        likeness: what has to be equal in groups that share: ranks, library and options.
    """
    place = {id(group): index for index, group in enumerate(groups)}
    alike: dict[Hashable, dict[Hashable, list[T]]] = {}
    for group in groups:
        lane: Hashable = lane_of(description(group))
        if lane is Lane.OWN:
            lane = id(group)
        alike.setdefault(likeness(group), {}).setdefault(lane, []).append(group)
    parts: list[list[T]] = []
    for lanes in alike.values():
        free = lanes.pop(None, [])
        apart = list(lanes.values())
        riders = [part for part in apart if lane_of(description(part[0])) is not Lane.OWN]
        if free and riders:
            # Groups without a lane ride on the coldest part there is.
            carrier = min(
                riders, key=lambda part: (any(is_bulk(description(g)) for g in part), place[id(part[0])])
            )
            carrier.extend(free)
            carrier.sort(key=lambda group: place[id(group)])
        elif free:
            apart.append(free)
        parts += apart
    return sorted(parts, key=lambda part: place[id(part[0])])
