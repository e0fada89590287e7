"""Which groups a training step and a weight export run collectives on.

A lazily created NCCL communicator exists only for a group on which a collective ran, so these rules decide how many
communicators there are to destroy, keep or suspend. The rules for the step were read from Megatron-core and are held
against recordings of real training in the tests (``tests/core/test_use_megatron.py``).

What a step is: forward and backward through ``get_forward_backward_func``, ``finalize_model_grads``, and
``optimizer.step`` with gradient clipping. A framework around Megatron may use more groups, for instance the
data-parallel group for averaging logged values: that is its own affair and not counted here.

What an export is: as slime and Relax do it, dense weights are gathered over tensor parallel ranks, expert weights
over expert-tensor ranks, and both are broadcast over pipeline ranks and experts over expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pitstop.inventory.topology import Topology
from pitstop.scenario import Scenario


class Use(StrEnum):
    """Occasions on which a group carries collectives."""

    STEP = "step"
    EXPORT = "export"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Training options that decide which groups a step uses; defaults are Megatron's usual ones for RL.

    ``aux_loss`` is the routers' load-balancing loss over one sequence or micro-batch (``aux_loss`` and
    ``seq_aux_loss``); ``token_count_loss`` is ``calculate_per_token_loss``.
    """

    moe: bool = False
    distributed_optimizer: bool = True
    tied_embeddings: bool = False
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    aux_loss: bool = True
    token_count_loss: bool = False

    @classmethod
    def of(cls, scenario: Scenario) -> StepOptions:
        """The options that a scenario states; what it does not state keeps its default."""
        return cls(
            moe=scenario.model.moe is not None,
            distributed_optimizer=scenario.optimizer.distributed,
            tied_embeddings=scenario.model.tied_embeddings,
        )


@dataclass(frozen=True, slots=True)
class UseOf:
    """How one kind of group is used; ``hot`` if it carries the bulk of forward, backward or gradient exchange."""

    uses: frozenset[Use] = frozenset()
    hot: bool = False


UNUSED = UseOf()


def use_by_kind(topology: Topology, options: StepOptions) -> Mapping[str, UseOf]:
    """Use of each kind of group by name; a kind that is missing carries no collective.

    A kind that is named here does run its collective, whatever the size of its group: Megatron reduces gradient
    statistics over a group of one rank too, and torch then makes a communicator of one rank.
    """
    hot = _hot_in_step(topology, options)
    step = hot | _cold_in_step(topology, options)
    export = _in_export(topology, options)
    return {
        name: UseOf(
            frozenset(use for use, names in ((Use.STEP, step), (Use.EXPORT, export)) if name in names),
            name in hot,
        )
        for name in step | export
    }


def _hot_in_step(t: Topology, options: StepOptions) -> set[str]:
    names = {
        "DATA_PARALLEL_GROUP_WITH_CP"
        if t.dist_opt_instances == 1
        else "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
    }
    if t.tp > 1:
        names.add("TENSOR_MODEL_PARALLEL_GROUP")
    if t.cp > 1:
        names.add("CONTEXT_PARALLEL_GROUP")
    if t.pp > 1:
        names.add("PIPELINE_MODEL_PARALLEL_GROUP")
    if t.dist_opt_instances > 1:
        names.add("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1")
    if options.moe:
        names |= _hot_in_moe_step(t, options)
    return names


def _hot_in_moe_step(t: Topology, options: StepOptions) -> set[str]:
    names = {
        "EXPERT_DATA_PARALLEL_GROUP"
        if t.dist_opt_instances == 1
        else "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0"
    }
    if options.dispatcher == "allgather":
        if t.expert_tp * t.ep > 1:
            names.add("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
        return names
    if t.ep > 1:
        names.add("EXPERT_MODEL_PARALLEL_GROUP")
    if t.expert_tp > 1:
        names.add("EXPERT_TENSOR_PARALLEL_GROUP")
    return names


def _cold_in_step(t: Topology, options: StepOptions) -> set[str]:
    names = {
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
        if options.distributed_optimizer
        else "MODEL_PARALLEL_GROUP"
    }
    if t.pp > 1 and options.tied_embeddings:
        names.add("EMBEDDING_GROUP")
    if options.moe:
        if not options.distributed_optimizer:
            names.add("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
        if options.aux_loss and t.tp * t.cp > 1:
            names.add("TENSOR_AND_CONTEXT_PARALLEL_GROUP")
        if options.dispatcher == "alltoall" and t.expert_tp * t.ep > 1:
            names.add("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    return names


def _in_export(t: Topology, options: StepOptions) -> set[str]:
    names = {"TENSOR_MODEL_PARALLEL_GROUP"} if t.tp > 1 else set()
    if t.pp > 1:
        names.add("PIPELINE_MODEL_PARALLEL_GROUP")
    if options.moe and t.expert_tp > 1:
        names.add("EXPERT_TENSOR_PARALLEL_GROUP")
    if options.moe and t.ep > 1:
        names.add("EXPERT_MODEL_PARALLEL_GROUP")
    return names
