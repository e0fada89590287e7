"""Parameters and bytes per rank, by Megatron-core's own arithmetic.

The counts are those of ``GPTModel`` with RMSNorm and rotary positions, and the tests hold them against real
models. Three choices of ours:

- Vocabulary: ``GPTModel`` takes its vocabulary as given, but ``megatron.training`` (and frameworks that use
  its arguments) first pads it to a multiple of ``make_vocab_size_divisible_by`` x tp. ``VOCAB_MULTIPLE`` is
  its default; a model built without that padding is asked for with ``vocab_multiple=1``.
- Key/value heads fewer than tp are not replicated: Megatron shards the whole QKV projection evenly over tp.
- Padding inside gradient buffers (64 elements per parameter, 128 per data-parallel rank at the end of a
  bucket) is left out: it is below 0.1 % for any model of interest.

Optimizer state is Megatron's: Adam has two fp32 moments and SGD one, plus an fp32 master copy unless the
parameters are fp32 themselves. The distributed optimizer shards it over dp x cp (experts over expert dp) of
one instance.
"""

from __future__ import annotations

from dataclasses import dataclass

from pitstop.errors import FieldProblem, InvalidScenarioError
from pitstop.inventory.classes import rank_classes
from pitstop.inventory.stages import Stage, stages_of
from pitstop.inventory.topology import Topology
from pitstop.models import ModelShape
from pitstop.scenario import Optimizer, Precision, Scenario

VOCAB_MULTIPLE = 128
EXPORT_BYTES_PER_PARAMETER = 2  # engines take bf16
_FP32 = 4
_MOMENTS = {"adam": 2, "sgd": 1}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one rank: of dense layers, embeddings and routers, and of routed experts."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds on its device between two steps, activations and communicators aside."""

    parameters: Parameters
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What a saver has to back up while the trainer is paused."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def export_bytes(self) -> int:
        """This rank's weight shard in the type that the engine takes (bf16)."""
        return self.parameters.total * EXPORT_BYTES_PER_PARAMETER


@dataclass(frozen=True, slots=True)
class ClassBytes:
    """Bytes of every rank of one class; see ``pitstop.inventory.rank_classes``."""

    representative: int
    count: int
    each: RankBytes


@dataclass(frozen=True, slots=True)
class Sizing:
    """Bytes of a scenario: per class, of the heaviest rank, and the totals that cost laws use.

    ``saved_bytes`` and ``export_bytes`` are per rank, those of the heaviest rank, or the scenario's own
    statement (``trainer.saved_bytes_per_rank``, ``trainer.export_bytes_per_rank``) if it makes one.
    ``total_parameters`` counts every parameter of the model once, without padding.
    """

    classes: tuple[ClassBytes, ...]
    heaviest: RankBytes
    saved_bytes: int
    export_bytes: int
    total_parameters: int


def size_scenario(scenario: Scenario, *, vocab_multiple: int = VOCAB_MULTIPLE) -> Sizing:
    """Sizes of all ranks of a scenario.

    Args:
        scenario: what to size.
        vocab_multiple: the vocabulary is padded to a multiple of this x tp; 1 for a model built without
            padding.

    Raises:
        InvalidScenarioError: the model cannot be sharded in this way.
    """
    of_stage = {
        stage: rank_bytes(scenario, stage, vocab_multiple=vocab_multiple) for stage in stages_of(scenario)
    }
    classes = tuple(ClassBytes(c.representative, c.count, of_stage[c.stage]) for c in rank_classes(scenario))
    heaviest = max(of_stage.values(), key=lambda each: each.saved_bytes)
    export = max(each.export_bytes for each in of_stage.values())
    trainer = scenario.trainer
    return Sizing(
        classes=classes,
        heaviest=heaviest,
        saved_bytes=heaviest.saved_bytes
        if trainer.saved_bytes_per_rank is None
        else trainer.saved_bytes_per_rank,
        export_bytes=export if trainer.export_bytes_per_rank is None else trainer.export_bytes_per_rank,
        total_parameters=total_parameters(scenario.model),
    )


def rank_bytes(scenario: Scenario, stage: Stage, *, vocab_multiple: int = VOCAB_MULTIPLE) -> RankBytes:
    """Bytes of one rank of a pipeline stage; all ranks of a stage hold the same.

    Raises:
        InvalidScenarioError: the model cannot be sharded in this way.
    """
    parameters = stage_parameters(scenario, stage, vocab_multiple=vocab_multiple)
    optimizer = scenario.optimizer
    width = _FP32 if optimizer.precision is Precision.FP32 else 2
    gradient_width = _FP32 if optimizer.grad_reduce_in_fp32 else width
    return RankBytes(
        parameters=parameters,
        weight_bytes=parameters.total * width,
        gradient_bytes=parameters.total * gradient_width,
        optimizer_bytes=_optimizer_bytes(scenario, optimizer, parameters),
    )


def _optimizer_bytes(scenario: Scenario, optimizer: Optimizer, parameters: Parameters) -> int:
    if optimizer.cpu_offload:
        return 0
    copies = _MOMENTS[optimizer.name] + (optimizer.precision is not Precision.FP32)
    if not optimizer.distributed:
        return parameters.total * copies * _FP32
    instances = scenario.layout.dist_opt_instances
    dense_shards = scenario.dp * scenario.layout.cp // instances
    apart = Topology.of(scenario).experts_apart
    expert_shards = scenario.expert_dp // instances if apart else dense_shards
    # Shards are cut without regard to parameters; the largest one is what the heaviest rank holds.
    owned = -(-parameters.dense // dense_shards) + -(-parameters.expert // expert_shards)
    return owned * copies * _FP32


def stage_parameters(scenario: Scenario, stage: Stage, *, vocab_multiple: int = VOCAB_MULTIPLE) -> Parameters:
    """Parameters of one rank of a pipeline stage.

    Raises:
        InvalidScenarioError: the model cannot be sharded in this way.
    """
    model, layout = scenario.model, scenario.layout
    tp, etp = layout.tp, layout.expert_tp
    shared = _embedding_parameters(model, stage, tp, vocab_multiple)
    dense = stage.layers * _attention_parameters(model, tp)
    dense += stage.dense_layers * _mlp_parameters(model, model.ffn_hidden_size, tp, "model.ffn_hidden_size")
    expert = 0
    if model.moe is not None and stage.moe_layers:
        moe = model.moe
        around = moe.num_experts * model.hidden_size  # the router; replicated on every rank
        if moe.shared_ffn_hidden_size:
            width = moe.shared_ffn_hidden_size
            around += _mlp_parameters(model, width, tp, "model.moe.shared_ffn_hidden_size")
        each = _mlp_parameters(model, moe.ffn_hidden_size, etp, "model.moe.ffn_hidden_size")
        dense += stage.moe_layers * around
        expert = stage.moe_layers * (moe.num_experts // layout.ep) * each
    return Parameters(dense=shared + dense, expert=expert)


def total_parameters(model: ModelShape) -> int:
    """Parameters of the whole model, each counted once, without vocabulary padding."""
    moe = model.moe
    leading = model.num_layers if moe is None else min(moe.first_dense_layers, model.num_layers)
    whole = Stage(leading, model.num_layers - leading, is_first=True, is_last=True)
    count = _embedding_parameters(model, whole, 1, 1) + whole.layers * _attention_parameters(model, 1)
    count += whole.dense_layers * _mlp_parameters(model, model.ffn_hidden_size, 1, "model.ffn_hidden_size")
    if moe is not None:
        each = moe.num_experts * (
            model.hidden_size + _mlp_parameters(model, moe.ffn_hidden_size, 1, "model.moe")
        )
        if moe.shared_ffn_hidden_size:
            each += _mlp_parameters(model, moe.shared_ffn_hidden_size, 1, "model.moe")
        count += whole.moe_layers * each
    return count


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """The vocabulary as ``megatron.training`` pads it: up to a multiple of ``multiple`` x tp."""
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def _embedding_parameters(model: ModelShape, stage: Stage, tp: int, vocab_multiple: int) -> int:
    """Word embedding, output layer and final norm, as far as they are on the stage."""
    table = padded_vocab_size(model.vocab_size, tp, vocab_multiple) // tp * model.hidden_size
    count = table if stage.is_first else 0
    if stage.is_last:
        count += model.hidden_size
        # A tied output layer is the embedding itself if both are on one stage, and a copy of it otherwise.
        if not (model.tied_embeddings and stage.is_first):
            count += table
    return count


def _attention_parameters(model: ModelShape, tp: int) -> int:
    """Attention of one layer on one rank, with the two norms of the layer."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    qkv = _shard(query + 2 * model.num_query_groups * model.head_dim, tp, "model.num_query_groups")
    count = qkv * hidden + _shard(query, tp, "model.num_attention_heads") * hidden + 2 * hidden
    if model.qk_layernorm:
        count += 2 * model.head_dim
    if model.add_bias or model.add_qkv_bias:
        count += qkv
    if model.add_bias:
        count += hidden
    return count


def _mlp_parameters(model: ModelShape, width: int, tp: int, field: str) -> int:
    """One MLP of inner width ``width`` on one rank; the bias of its output is not sharded."""
    shard = _shard(width, tp, field)
    inputs = 2 if model.gated_mlp else 1
    count = (inputs + 1) * shard * model.hidden_size
    if model.add_bias:
        count += inputs * shard + model.hidden_size
    return count


def _shard(width: int, ways: int, field: str) -> int:
    if width % ways:
        problem = FieldProblem(
            field, str(width), f"cannot be split over {ways} ranks", "Use a size that divides it."
        )
        raise InvalidScenarioError("the model cannot be sharded in this way", [problem])
    return width // ways
