"""A small GPT, trained by Megatron-core itself: its model, wrapper, optimizer and schedules.

The data are random tokens and the model learns to repeat them, so that the loss falls within a few steps.
Everything is seeded: two runs with the same options give bit-identical losses and parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cpu import device, layers, uneven

_SEED = 1234
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TrainOptions:
    """Layout, model and training options; sizes are small enough for a step in milliseconds."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    dist_opt_instances: int = 1
    gloo_groups: bool = False
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    bf16: bool = False
    experts: int = 0
    dispatcher: str = "alltoall"
    aux_loss: bool = True
    per_token_loss: bool = False
    tied: bool = True
    qk_layernorm: bool = False
    num_layers: int = 2
    hidden: int = 32
    heads: int = 4
    query_groups: int = 4
    vocab: int = 64
    sequence: int = 16
    micro_batch: int = 2
    micro_batches: int = 2
    dropout: float = 0.0


class Trainer:
    """Model, optimizer and data of one rank; call ``join_world`` first."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = o = options
        parallel_state.initialize_model_parallel(
            o.tp,
            o.pp,
            context_parallel_size=o.cp,
            expert_model_parallel_size=o.ep,
            expert_tensor_parallel_size=o.etp,
            num_distributed_optimizer_instances=o.dist_opt_instances,
            order=o.order,
            create_gloo_process_groups=o.gloo_groups,
        )
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(_SEED)
        tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        self.config = _config(o)
        self.model = _model(o, self.config)
        self.ddp = DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=o.distributed_optimizer,
                grad_reduce_in_fp32=o.bf16,
                overlap_grad_reduce=o.overlap,
                overlap_param_gather=o.overlap and o.distributed_optimizer,
                bucket_size=2000 if o.overlap else None,
                num_distributed_optimizer_instances=o.dist_opt_instances,
            ),
            module=self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=o.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=o.distributed_optimizer,
                overlap_param_gather=o.overlap and o.distributed_optimizer,
                clip_grad=1.0,
                weight_decay=0.01,
            ),
            [self.ddp],
            use_gloo_process_groups=o.gloo_groups,
        )
        self._hook_up_schedule()
        self._batches = self._data()

    def _hook_up_schedule(self) -> None:
        config, o = self.config, self.options
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if o.overlap:
            config.no_sync_func = self.ddp.no_sync
            config.grad_sync_func = self.ddp.start_grad_sync
            if o.distributed_optimizer:
                config.param_sync_func = self.ddp.start_param_sync

    def step(self) -> tuple[float | None, float | None]:
        """One training step; returns the mean loss (None on stages without one) and the gradient norm."""
        o = self.options
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._batches,
            model=[self.ddp],
            num_microbatches=o.micro_batches,
            seq_length=o.sequence,
            micro_batch_size=o.micro_batch,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        loss = float(sum(out["loss"] for out in outputs) / len(outputs)) if outputs else None
        return loss, None if norm is None else float(norm)

    def digest(self) -> str:
        """Hash of all parameters of this rank, bit by bit."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().float().numpy().tobytes())
        return digest.hexdigest()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: weights, gradient buffers, optimizer state with master copies."""
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        state = 0
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = optimizer.optimizer
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                if parameter.untyped_storage().data_ptr() not in weights:
                    state += parameter.nbytes  # a master copy
                state += sum(
                    t.nbytes for t in inner.state[parameter].values() if torch.is_tensor(t) and t.dim()
                )
        buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        return {
            "weight": sum(p.nbytes for p in self.model.parameters()),
            "gradient": sum(buffer.grad_data.nbytes for buffer in buffers),
            "optimizer": state,
        }

    def _data(self) -> Iterator[Batch]:
        o = self.options
        generator = torch.Generator().manual_seed(99 + parallel_state.get_data_parallel_rank())
        while True:
            tokens = torch.randint(0, o.vocab, (o.micro_batch, o.sequence), generator=generator)
            batch = {
                "tokens": tokens,
                "labels": tokens,
                "position_ids": torch.arange(o.sequence).repeat(len(tokens), 1),
            }
            if o.cp > 1:
                batch = {name: _context_part(tensor) for name, tensor in batch.items()}
            yield batch["tokens"], batch["labels"], batch["position_ids"]

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        tokens, labels, positions = next(batches)
        length = self.options.sequence
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        output = model(tokens, positions, mask, labels=labels)

        def loss_function(losses: Tensor) -> tuple[Any, ...]:
            if self.options.per_token_loss:
                count = torch.tensor(losses.numel(), dtype=torch.int)
                return losses.float().sum(), count, {"loss": losses.detach().float().mean()}
            mean = losses.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss_function


def _context_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sequence under context parallelism, shape (batch, sequence): a chunk from either end.

    The same split as Megatron's ``get_batch_on_this_cp_rank``, whose arguments differ between releases.
    """
    rank, ranks = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)


def _config(o: TrainOptions) -> TransformerConfig:
    dtype = torch.bfloat16 if o.bf16 else torch.float32
    moe: dict[str, Any] = {}
    if o.experts:
        moe = {
            "num_moe_experts": o.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": o.dispatcher,
            "moe_ffn_hidden_size": o.hidden * 2,
            "moe_router_load_balancing_type": "aux_loss" if o.aux_loss else "none",
            "moe_aux_loss_coeff": 1e-2 if o.aux_loss else 0.0,
        }
    return TransformerConfig(
        num_layers=o.num_layers,
        hidden_size=o.hidden,
        num_attention_heads=o.heads,
        num_query_groups=o.query_groups,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=o.qk_layernorm,
        use_cpu_initialization=True,
        tensor_model_parallel_size=o.tp,
        pipeline_model_parallel_size=o.pp,
        context_parallel_size=o.cp,
        expert_model_parallel_size=o.ep,
        expert_tensor_parallel_size=o.tp if o.etp is None else o.etp,
        sequence_parallel=o.sequence_parallel,
        calculate_per_token_loss=o.per_token_loss,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=o.bf16,
        hidden_dropout=o.dropout,
        attention_dropout=o.dropout,
        deterministic_mode=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        **moe,
    )


def _model(o: TrainOptions, config: TransformerConfig) -> torch.nn.Module:
    spec = get_gpt_layer_local_spec(
        num_experts=o.experts or None, qk_layernorm=o.qk_layernorm, normalization="RMSNorm"
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers.cpu_block(spec, o.num_layers // o.pp, context_parallel=o.cp > 1),
        vocab_size=o.vocab,
        max_sequence_length=o.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=o.tied,
        position_embedding_type="rope",
    )
    return Float16Module(config, model) if o.bf16 else model


def join_world(rank: int, world_size: int, rendezvous: str, backend: str = "gloo") -> None:
    """Make torch's default group and put what the CPU lacks in place (``device``, ``uneven``)."""
    torch.set_num_threads(1)
    device.install()
    uneven.install()
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
