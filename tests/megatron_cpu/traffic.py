"""Record on which process groups collectives and point-to-point messages run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """While entered, counts the operations of ``torch.distributed`` per group, forward and backward alike.

    Every collective goes through torch's dispatcher as an operation of ``c10d`` (or ``_c10d_functional``)
    that has its group among its arguments: none can be missed, whatever function it was called by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            group = next((g for g in map(_group_name, args) if g is not None), "unknown")
            self.counts[group, func._opname] += 1
        return func(*args, **(kwargs or {}))

    def groups(self) -> set[str]:
        """Names of the groups that carried something."""
        return {group for group, _ in self.counts}


def _group_name(argument: object) -> str | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).group_name
        except (RuntimeError, TypeError):
            return None
    return (
        argument
        if isinstance(argument, str) and argument in dist.distributed_c10d._world.pg_names.values()
        else None
    )


def groups_by_name() -> dict[str, tuple[str, list[int]]]:
    """Description and ranks of this rank's groups, by torch's own name, in the order of creation."""
    return {
        name: (group.group_desc, dist.get_process_group_ranks(group))
        for group, name in dist.distributed_c10d._world.pg_names.items()
    }
