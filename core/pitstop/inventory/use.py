"""Which groups a training step and a weight export run collectives on.

A lazily created NCCL communicator exists only for a group on which a collective ran, so these rules
decide how many communicators there are to destroy, keep or suspend. The rules for the step were read from
Megatron-core and are held against recordings of real training (``tests/core/test_use_megatron.py``).

A step is: forward and backward through ``get_forward_backward_func``, ``finalize_model_grads``, and
``optimizer.step`` with gradient clipping. A framework around Megatron may use more groups (the data-parallel
group, say, to average what it logs): its own affair, not counted here. The default group is used by no step,
but building the optimizer runs an all-gather on it, so that its communicator exists from then on. The
separate all-gather groups serve Megatron-FSDP only, which is not covered.

An export is: dense weights gathered over tensor-parallel ranks, expert weights over expert-tensor ranks,
both handed on over pipeline ranks, and experts over expert-parallel ranks, as slime and Relax do it.
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
    """Training options that decide which groups a step uses; defaults are the usual ones for RL.

    ``aux_loss`` is the routers' load-balancing loss over a sequence or micro-batch (``aux_loss`` and
    ``seq_aux_loss``); ``per_token_loss`` is Megatron's ``calculate_per_token_loss``.
    """

    moe: bool = False
    distributed_optimizer: bool = True
    tied_embeddings: bool = False
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    aux_loss: bool = True
    per_token_loss: bool = False

    @classmethod
    def of(cls, scenario: Scenario) -> StepOptions:
        """The options that a scenario states; what it does not state keeps its default."""
        return cls(
            moe=scenario.model.moe is not None,
            distributed_optimizer=scenario.optimizer.distributed,
            tied_embeddings=scenario.model.tied_embeddings,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """What matters of a rank's pipeline stage: whether it is the last, and whether it has expert layers."""

    is_last_stage: bool
    has_experts: bool


@dataclass(frozen=True, slots=True)
class UseOf:
    """How a group is used; ``hot`` if it carries the bulk of forward, backward or gradient exchange."""

    uses: frozenset[Use] = frozenset()
    hot: bool = False


UNUSED = UseOf()
# Group for the gradient norm of experts without the distributed optimizer; 0.19 took a new one, if equal in ranks.
_EXPERT_NORM = {
    False: "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    True: "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
}


def use_by_kind(topology: Topology, options: StepOptions, place: Place) -> Mapping[str, UseOf]:
    """Use of each kind of group by name; a kind that is missing carries no collective.

    Groups of one rank are included: Megatron runs some collectives (gradient statistics, the loss over the
    split vocabulary) whatever the size of the group, and torch then makes a communicator of one rank.
    """
    hot = _hot_in_step(topology, options, place)
    step = hot | _cold_in_step(topology, options, place)
    export = _in_export(topology, place)
    occasions = ((Use.STEP, step), (Use.EXPORT, export))
    return {
        name: UseOf(frozenset(use for use, names in occasions if name in names), hot=name in hot)
        for name in step | export
    }


def _chosen(rules: Mapping[str, bool]) -> set[str]:
    return {name for name, holds in rules.items() if holds}


def _hot_in_step(t: Topology, options: StepOptions, place: Place) -> set[str]:
    """Groups that carry activations, tokens, gradients or parameters."""
    whole = t.dist_opt_instances == 1
    apart = place.has_experts and t.experts_apart
    alltoall = place.has_experts and options.dispatcher == "alltoall"
    return _chosen(
        {
            "DATA_PARALLEL_GROUP_WITH_CP": whole,
            "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": not whole,
            "TENSOR_MODEL_PARALLEL_GROUP": t.tp > 1 or place.is_last_stage,
            "CONTEXT_PARALLEL_GROUP": t.cp > 1,
            "PIPELINE_MODEL_PARALLEL_GROUP": t.pp > 1,
            "EXPERT_MODEL_PARALLEL_GROUP": alltoall and t.ep > 1,
            "EXPERT_TENSOR_PARALLEL_GROUP": alltoall and t.expert_tp > 1,
            "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": (
                place.has_experts and not alltoall and t.expert_tp * t.ep > 1
            ),
            "EXPERT_DATA_PARALLEL_GROUP": apart and whole,
            "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": apart and not whole,
            # Gradients of dense layers too are reduced between instances over this group.
            "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": not whole,
            # Read from the source only: no recording has covered generalized tensor parallelism.
            "GTP_WEIGHT_REMAT_GROUP": t.gtp > 1,
            "EXPERT_GTP_WEIGHT_REMAT_GROUP": place.has_experts and t.egtp > 1,
        }
    )


def _cold_in_step(t: Topology, options: StepOptions, place: Place) -> set[str]:
    """Groups that carry a few numbers, or the gradient of the embedding once per step."""
    sharded = options.distributed_optimizer
    # The all-to-all dispatcher exchanges token counts over this group, the other one the tokens themselves.
    counts = place.has_experts and options.dispatcher == "alltoall" and t.expert_tp * t.ep > 1
    return _chosen(
        {
            "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": sharded,  # gradient norm
            "MODEL_PARALLEL_GROUP": not sharded,
            _EXPERT_NORM[t.rules.has_gtp]: not sharded and place.has_experts and t.experts_apart,
            "EMBEDDING_GROUP": t.pp > 1 and options.tied_embeddings,
            "TENSOR_AND_CONTEXT_PARALLEL_GROUP": place.has_experts and options.aux_loss and t.tp * t.cp > 1,
            "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": counts,
            "DATA_PARALLEL_GROUP_WITH_CP": options.per_token_loss,  # number of tokens
            "PIPELINE_MODEL_PARALLEL_GROUP": options.per_token_loss,
        }
    )


def _in_export(t: Topology, place: Place) -> set[str]:
    return _chosen(
        {
            "TENSOR_MODEL_PARALLEL_GROUP": t.tp > 1,
            "PIPELINE_MODEL_PARALLEL_GROUP": t.pp > 1,
            "EXPERT_TENSOR_PARALLEL_GROUP": place.has_experts and t.expert_tp > 1,
            "EXPERT_MODEL_PARALLEL_GROUP": place.has_experts and t.ep > 1,
        }
    )
