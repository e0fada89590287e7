"""Coalesced point-to-point batches: the one function of ``torch.distributed`` that Pitstop replaces.

``batch_isend_irecv`` coalesces a batch into one NCCL launch only if ``type(group) is ProcessGroup``: a test
for the exact class, which no handle can pass. Without coalescing, each message of a pipeline exchange would make
a two-rank communicator of its own and could block the matching one. So the batch is handed on with the group
below the handle, which is of torch's class; all else is torch's function as it is.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pitstop_runtime.groups.handle import ManagedGroup

_torch_batch_isend_irecv = distributed_c10d.batch_isend_irecv


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
    """Torch's ``batch_isend_irecv``, with managed groups replaced by the live groups below them."""
    group = (p2p_op_list[0].group or dist.group.WORLD) if p2p_op_list else None
    if isinstance(group, ManagedGroup) and all((op.group or dist.group.WORLD) is group for op in p2p_op_list):
        live = group._live
        live._start_coalescing  # noqa: B018 - raises the typed error if the group is released
        p2p_op_list = [_over(op, live) for op in p2p_op_list]
    return _torch_batch_isend_irecv(p2p_op_list)


def install() -> None:
    """Put the function in place; again, it does nothing."""
    dist.batch_isend_irecv = batch_isend_irecv
    distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _over(op: dist.P2POp, group: Any) -> dist.P2POp:
    moved = object.__new__(dist.P2POp)  # its own __new__ would look the group up in torch's registry
    moved.__dict__.update(op.__dict__)  # the ranks in it count within the group: both have the same members
    moved.group = group
    return moved
