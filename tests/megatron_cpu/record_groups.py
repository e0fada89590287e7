"""Which groups does the installed Megatron-core make? Topologies in, groups out, as JSON lines.

``initialize_model_parallel`` runs as it is; only ``torch.distributed.new_group`` and its questions about
rank and world are answered by a recorder, so that one process stands for a world of any size. All ranks make
the same calls in the same order, so that one recording holds the groups of every rank.

With ``--real``: with ``new_group`` of torch itself over torch's fake backend, as seen by one rank, which the
input names as ``rank`` (no gloo groups: they need peers).

Input: the arguments of ``initialize_model_parallel`` by their own names, plus ``world_size``, and
``all_gather_groups`` for a call of ``create_all_gather_groups`` afterwards.
Output: ``{"version": ..., "groups": [[description, backend, configuration, [ranks]], ...]}``, or
``{"refused": message}``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from megatron_cpu.compat import stand_in_for_triton_kernels

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
stand_in_for_triton_kernels()

import torch.distributed as dist  # noqa: E402
from megatron.core import __version__, parallel_state  # noqa: E402

Recorded = list[tuple[str, str, str | None, list[int]]]


@dataclass
class Stub:
    """Stands for a process group of which only the size is asked."""

    ranks: list[int]

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return 0


class Recorder:
    """Answers the questions that group creation asks torch, as rank 0 of a world of a given size."""

    def __init__(self) -> None:
        self.world_size = 1
        self.calls: Recorded = []
        dist.new_group = self.new_group
        dist.get_rank = lambda *_: 0
        dist.get_world_size = lambda *_: self.world_size
        dist.is_initialized = lambda: True
        # The options of a communicator become the name of their entry in the configuration file.
        parallel_state.get_nccl_options = lambda name, _configurations: name

    def new_group(
        self,
        ranks: list[int],
        backend: str | None = None,
        group_desc: str = "",
        pg_options: str | None = None,
        **_: object,
    ) -> Stub:
        configuration = None if backend == "gloo" else pg_options
        members = sorted(ranks)  # as torch does
        self.calls.append((group_desc, backend or "nccl", configuration, members))
        return Stub(members)

    def record(self, arguments: dict[str, Any]) -> Recorded:
        """Groups made for one topology, in order."""
        arguments = dict(arguments)
        self.world_size, self.calls = arguments.pop("world_size"), []
        all_gather = arguments.pop("all_gather_groups", False)
        _forget()
        parallel_state.initialize_model_parallel(**arguments)
        if all_gather:
            parallel_state.create_all_gather_groups(for_expert_parallelism=True)
        return self.calls


_PRISTINE = {
    name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name[1:].isupper()
}


def _forget() -> None:
    """Back to the state after import; ``destroy_model_parallel`` alone forgets some of the groups."""
    for name, value in _PRISTINE.items():
        setattr(parallel_state, name, dict(value) if isinstance(value, dict) else value)


def record_real(arguments: dict[str, Any]) -> Recorded:
    """Groups of one rank as torch itself made them over its fake backend, in the order of creation."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    arguments = dict(arguments)
    rank, world_size = arguments.pop("rank"), arguments.pop("world_size")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **arguments)
    groups = list(dist.distributed_c10d._world.pg_names)[1:]  # the first is the default group
    recorded: Recorded = [
        (group.group_desc, "nccl", None, dist.get_process_group_ranks(group)) for group in groups
    ]
    dist.destroy_process_group()
    _forget()
    return recorded


def main() -> None:
    """Answer each line of the standard input with one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--real", action="store_true")
    record = record_real if parser.parse_args().real else Recorder().record
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"version": __version__, "groups": record(json.loads(line))}
        except (RuntimeError, AssertionError, ValueError, ZeroDivisionError) as refusal:
            answer = {"version": __version__, "refused": f"{type(refusal).__name__}: {refusal}"[:200]}
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
