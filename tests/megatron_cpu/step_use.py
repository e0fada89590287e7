"""On which groups does a training step run collectives? Jobs in, answers out, as JSON lines.

Job: ``{"world_size": 4, "options": {...}}`` with the fields of ``TrainOptions``.
Answer: per rank the groups (description, ranks) in the order of creation, and the indices of those that
carried something while the model was built (``setup``) and in a step that is not the first (``step``), plus
losses, gradient norm, hash of the parameters and bytes held.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from functools import partial
from typing import Any

from megatron_cpu.compat import stand_in_for_triton_kernels

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
stand_in_for_triton_kernels()

from megatron_cpu.launch import run_ranks  # noqa: E402
from megatron_cpu.traffic import Traffic, groups_by_name  # noqa: E402
from megatron_cpu.trainer import Trainer, TrainOptions, join_world  # noqa: E402

_WARM_STEPS = 1


def observe(options: TrainOptions, rank: int, world_size: int, rendezvous: str) -> dict[str, Any]:
    """Train a few steps and say which groups were used when."""
    join_world(rank, world_size, rendezvous)
    with Traffic() as setup:
        trainer = Trainer(options)
    losses = [trainer.step()[0] for _ in range(_WARM_STEPS)]
    with Traffic() as step:
        loss, norm = trainer.step()
    groups = groups_by_name()
    index = {name: i for i, name in enumerate(groups)}
    return {
        "groups": list(groups.values()),
        "setup": sorted(index[name] for name in setup.groups()),
        "step": sorted(index[name] for name in step.groups()),
        "operations": sorted((groups[name][0], operation, n) for (name, operation), n in step.counts.items()),
        "losses": [*losses, loss],
        "norm": norm,
        "digest": trainer.digest(),
        "bytes": trainer.held_bytes(),
    }


def main() -> None:
    """Answer each line of the standard input with one line."""
    for line in sys.stdin:
        job = json.loads(line)
        function = partial(observe, TrainOptions(**job["options"]))
        print(json.dumps(run_ranks(function, job["world_size"], job.get("timeout_s", 60.0))), flush=True)


if __name__ == "__main__":
    main()
