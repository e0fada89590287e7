"""Coalesced point-to-point batches: the one function of ``torch.distributed`` that is replaced, and only up to 2.13.

``batch_isend_irecv`` makes one NCCL launch of a batch. Up to torch 2.13 it does so only if ``type(group) is
ProcessGroup``. That is a test for the exact class: nothing that a registered backend can return passes it unless
it is torch's own group, and that could not be rebuilt below the trainer's references. Failing the test, torch
sends message by message. NCCL then makes a communicator of two ranks for every pair (memory, and none that a
switch knows of), and a batch in which both sides send first blocks, which pipeline stages do.

So the batch is handed on with the group below the handle, which is of torch's class; all else is torch's function
as it is. From 2.14 on torch asks ``isinstance``, which a handle passes, and nothing is replaced.
``tests/runtime/test_groups_p2p.py`` shows that torch's own does not coalesce where this is put in its place, and
``tests/gpu`` that NCCL makes no communicators of pairs.

Who has imported the function by name before the first group was made keeps torch's own; Megatron does not.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pitstop_runtime.groups.handle import ManagedGroup

_torch_batch_isend_irecv = distributed_c10d.batch_isend_irecv


def needed() -> bool:
    """Whether this release of torch asks for the exact class."""
    try:
        source = inspect.getsource(_torch_batch_isend_irecv)
    except OSError:  # torch without its sources; then rather once too often, it does no harm
        return True
    return "type(group) is ProcessGroup" in source


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
    """Torch's ``batch_isend_irecv``, with managed groups replaced by the live groups below them."""
    group = _only_group(p2p_op_list)
    if isinstance(group, ManagedGroup):
        live = group.live("batch_isend_irecv")
        p2p_op_list = [_over(op, live) for op in p2p_op_list]
    return _torch_batch_isend_irecv(p2p_op_list)


def install() -> None:
    """Put the function in place where it is needed; again, it does nothing."""
    if needed():
        dist.batch_isend_irecv = batch_isend_irecv
        distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _only_group(operations: object) -> Any:
    """The group of a proper batch; whatever else it is, torch's function says so."""
    if not isinstance(operations, list) or not all(isinstance(op, dist.P2POp) for op in operations):
        return None
    groups = {op.group for op in operations}
    return groups.pop() if len(groups) == 1 else None


def _over(op: dist.P2POp, group: Any) -> dist.P2POp:
    moved = object.__new__(dist.P2POp)  # its own __new__ would look the group up in torch's registry
    moved.__dict__.update(op.__dict__)  # the ranks in it count within the group: both have the same members
    moved.group = group
    return moved
