"""The kinds of process groups that Megatron-core makes, in the order in which it makes them.

Source: ``initialize_model_parallel`` in ``megatron/core/parallel_state.py``, releases 0.16 and 0.19. The
names are Megatron's ``group_desc``; the configuration names are the keys of the file at
``nccl_communicator_config_path``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pitstop.inventory.partition import Form, Grid, Members, members
from pitstop.inventory.topology import Topology


class Backend(StrEnum):
    """The library that carries a group's collectives."""

    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True, slots=True)
class GroupKind:
    """One kind of group: every rank is in at most one group of a kind."""

    name: str
    config_name: str | None
    backend: Backend
    members: Members


def group_kinds(topology: Topology) -> tuple[GroupKind, ...]:
    """All kinds of groups of a topology, in the order of creation, the default group apart."""
    return tuple(_kinds(topology))


def _both(name: str, config: str, recipe: Members, gloo: bool) -> Iterator[GroupKind]:
    """A group and, if Megatron makes one, its gloo twin."""
    yield GroupKind(name, config, Backend.NCCL, recipe)
    if gloo:
        yield GroupKind(f"{name}_GLOO", None, Backend.GLOO, recipe)


def _nccl(name: str, config: str, recipe: Members) -> GroupKind:
    return GroupKind(name, config, Backend.NCCL, recipe)


def _kinds(t: Topology) -> Iterator[GroupKind]:
    dense, expert = Grid.DENSE, Grid.EXPERT
    has_gtp = t.rules.has_gtp
    if has_gtp:
        yield _nccl("GTP_WEIGHT_REMAT_GROUP", "gtp_remat", members(dense, "gtp_remat"))
    gloo = t.gloo_groups and t.gtp == 1  # 0.19 drops the gloo groups under gtp
    yield from _data_parallel(t, gloo)
    yield _nccl("CONTEXT_PARALLEL_GROUP", "cp", members(dense, "cp"))
    yield _nccl("MODEL_PARALLEL_GROUP", "mp", members(dense, "tp-gtp_remat-pp"))
    yield _nccl("TENSOR_MODEL_PARALLEL_GROUP", "tp", members(dense, "tp"))
    yield _nccl("PIPELINE_MODEL_PARALLEL_GROUP", "pp", members(dense, "pp"))
    yield _nccl("EMBEDDING_GROUP", "embd", members(dense, "pp", Form.ENDS))
    yield _nccl("POSITION_EMBEDDING_GROUP", "pos_embd", members(dense, "pp", Form.FIRST))
    yield _nccl("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "tp_dp_cp", members(dense, "tp-gtp_remat-dp-cp"))
    yield _nccl("TENSOR_AND_DATA_PARALLEL_GROUP", "tp_dp", members(dense, "tp-gtp_remat-dp"))
    yield _nccl("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp_cp", members(dense, "tp-cp"))
    if has_gtp:
        yield _nccl("EXPERT_GTP_WEIGHT_REMAT_GROUP", "expt_gtp_remat", members(expert, "gtp_remat"))
    yield _nccl("EXPERT_MODEL_PARALLEL_GROUP", "ep", members(expert, "ep"))
    yield _nccl("EXPERT_TENSOR_PARALLEL_GROUP", "ep_tp", members(expert, "tp"))
    yield _nccl("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "tp_ep_mp", members(expert, "tp-ep"))
    yield _nccl("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "tp_ep_pp", members(expert, "tp-ep-pp"))
    if has_gtp:
        yield _nccl(
            "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
            "tp_ep_gtp_remat_pp",
            members(expert, "tp-ep-gtp_remat-pp"),
        )
    yield from _expert_data_parallel(t, gloo and t.egtp == 1)
    yield _nccl("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "intra_dist_opt_instance", _instance(t))
    if t.all_gather_group and t.rules.late_all_gather:
        dp_cp = members(dense, "dp-cp", default_order=True)
        yield _nccl("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp_cp", dp_cp)
        if t.ep > 1:
            yield _nccl("EXPERT_DATA_PARALLEL_GROUP_AG", "ep_dp", members(expert, "dp", default_order=True))


def _data_parallel(t: Topology, gloo: bool) -> Iterator[GroupKind]:
    name, dp_cp = "DATA_PARALLEL_GROUP_WITH_CP", members(Grid.DENSE, "dp-cp")
    yield _nccl(name, "dp_cp", dp_cp)
    if t.all_gather_group and not t.rules.late_all_gather:
        yield _nccl(f"{name}_AG", "dp_cp", dp_cp)
    if gloo:
        yield GroupKind(f"{name}_GLOO", None, Backend.GLOO, dp_cp)
    if t.dist_opt_instances > 1:
        part = members(Grid.DENSE, "dp-cp", Form.CHUNKS, t.dist_opt_instances)
        yield from _both(f"INTRA_PARTIAL_{name}", "intra_dp_cp", part, gloo)
    yield from _both("DATA_PARALLEL_GROUP", "dp", members(Grid.DENSE, "dp"), gloo)
    if t.gtp > 1:
        gtp_dp, gtp_dp_cp = members(Grid.DENSE, "gtp_remat-dp"), members(Grid.DENSE, "gtp_remat-dp-cp")
        yield _nccl("DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "gtp_remat_dp", gtp_dp)
        yield _nccl("DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "gtp_remat_dp_cp", gtp_dp_cp)


def _expert_data_parallel(t: Topology, gloo: bool) -> Iterator[GroupKind]:
    name = "EXPERT_DATA_PARALLEL_GROUP"
    yield from _both(name, "ep_dp", members(Grid.EXPERT, "dp"), gloo)
    if t.dist_opt_instances > 1:
        levels = (("intra_ep_dp", Form.CHUNKS), ("inter_ep_dp", Form.STRIDED))
        for level, (config, form) in enumerate(levels):
            recipe = members(Grid.EXPERT, "dp", form, t.dist_opt_instances)
            yield _nccl(f"HIERARCHICAL_{name}_L{level}", config, recipe)
            if gloo:
                yield GroupKind(f"HIERARCHICAL_{name}_GLOO_L{level}", None, Backend.GLOO, recipe)
    if t.egtp > 1:
        yield _nccl(f"{name}_WITH_GTP_REMAT", "ep_gtp_remat_dp", members(Grid.EXPERT, "gtp_remat-dp"))


def _instance(t: Topology) -> Members:
    """Ranks of one distributed-optimizer instance: tp-ep-pp groups joined; all ranks under gtp."""
    if max(t.gtp, t.egtp) > 1:
        return members(Grid.EXPERT, "dp", Form.WORLD)
    return members(Grid.EXPERT, "tp-ep-pp", Form.JOINED, t.expert_dp // t.dist_opt_instances)
