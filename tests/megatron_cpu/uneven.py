"""Collectives of unequal pieces, which NCCL has and gloo lacks: pieces are padded to the largest one.

Megatron's all-to-all token dispatcher gathers and scatters token lists of unequal length over expert-tensor
ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter


def install() -> None:
    """Put the padding versions in place for the rest of the process."""
    dist.all_gather = _all_gather_unequal
    dist.reduce_scatter = _reduce_scatter_unequal


def _all_gather_unequal(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    longest = max(len(piece) for piece in tensor_list) if tensor.dim() else 0
    if all(piece.shape == tensor.shape for piece in tensor_list):
        return _all_gather(tensor_list, tensor, *args, **kwargs)
    padded = [piece.new_empty((longest, *piece.shape[1:])) for piece in tensor_list]
    _all_gather(padded, _padded(tensor, longest), *args, **kwargs)
    for piece, whole in zip(tensor_list, padded, strict=True):
        piece.copy_(whole[: len(piece)])
    return None


def _reduce_scatter_unequal(output: Tensor, input_list: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    longest = max(len(piece) for piece in input_list)
    if all(piece.shape == output.shape for piece in input_list):
        return _reduce_scatter(output, input_list, *args, **kwargs)
    result = output.new_empty((longest, *output.shape[1:]))
    _reduce_scatter(result, [_padded(piece, longest) for piece in input_list], *args, **kwargs)
    output.copy_(result[: len(output)])
    return None


def _padded(piece: Tensor, length: int) -> Tensor:
    return torch.cat([piece, piece.new_zeros((length - len(piece), *piece.shape[1:]))])
