"""Layers that upstream has for GPUs only: norms for sequence, attention for context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


class MarkedNorm:
    """Torch's norm, marked for the gradient exchange over tensor parallel ranks.

    Upstream's ``WrappedTorchNorm`` refuses sequence parallelism; the norms of TransformerEngine carry this
    mark. A class whose instances are torch's, because Megatron builds classes and leaves functions alone.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class GatheringAttention(torch.nn.Module):
    """Causal attention that gathers keys and values over the context-parallel group.

    Sequences are cut into ``2 x cp`` chunks of which rank ``i`` has the ``i``-th from either end, as
    Megatron's ``get_batch_on_this_cp_rank`` hands them out. Upstream's local attention works for cp = 1
    only.
    """

    def __init__(self, config: Any, *_args: object, pg_collection: Any = None, **_kwargs: object) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.group = (
            pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        )
        self.softmax_scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """Inputs have shape (sequence, batch, heads, head size); the output (sequence, batch, hidden)."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        length, batch, heads, _ = query.shape
        ranks = self.group.size()
        mine = self._positions(self.group.rank(), length)
        if ranks > 1:
            key = gather_from_sequence_parallel_region(key, group=self.group)
            value = gather_from_sequence_parallel_region(value, group=self.group)
        theirs = torch.cat([self._positions(rank, length) for rank in range(ranks)])
        repeat = heads // key.shape[2]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, _repeated(key, repeat), _repeated(value, repeat)))
        scores = (q @ k.transpose(-1, -2)) * self.softmax_scale
        scores = scores.masked_fill(theirs[None, :] > mine[:, None], float("-inf"))
        weights = scores.float().softmax(-1).to(query.dtype)
        return (weights @ v).permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _positions(self, rank: int, length: int) -> Tensor:
        ranks = self.group.size()
        if ranks == 1:
            return torch.arange(length)
        chunk = length // 2
        last = 2 * ranks - 1 - rank
        return torch.cat([torch.arange(i * chunk, (i + 1) * chunk) for i in (rank, last)])


def _repeated(heads: Tensor, times: int) -> Tensor:
    return heads if times == 1 else heads.repeat_interleave(times, dim=2)


def cpu_block(layer_spec: Any, layers: int, context_parallel: bool) -> TransformerBlockSubmodules:
    """Upstream's local layers, ``layers`` of them, with those of this module where they do not work."""
    parts = layer_spec.submodules
    attention = parts.self_attention.submodules
    for holder in (parts, attention):
        for name, part in list(vars(holder).items()):
            if part is WrappedTorchNorm:
                setattr(holder, name, MarkedNorm)
    if context_parallel:
        attention.core_attention = GatheringAttention
    return TransformerBlockSubmodules(layer_specs=[layer_spec] * layers, layer_norm=MarkedNorm)
