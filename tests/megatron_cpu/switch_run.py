"""Train with switches between the steps. Jobs in, answers out, as JSON lines.

Job: ``world_size``, ``options`` (fields of ``TrainOptions``), ``steps``, ``plan`` (a name, or null for a run that
never switches and knows nothing of Pitstop), ``saver`` (whether the real torch_memory_saver pauses the memory).
Answer, per rank: losses, gradient norms, a hash of the parameters after each step, what the export gathered, and
how the switches went.
"""

from __future__ import annotations

import contextlib
import hashlib
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

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

import pitstop_runtime.groups  # noqa: E402
from megatron_cpu.launch import run_ranks  # noqa: E402
from megatron_cpu.trainer import Trainer, TrainOptions, join_world  # noqa: E402
from pitstop.gates import TORCH_MEMORY_SAVER, Facts  # noqa: E402
from pitstop.telemetry import StepRecord  # noqa: E402
from pitstop_runtime.executor import Limits  # noqa: E402
from pitstop_runtime.manager import Settings, SwitchManager  # noqa: E402
from pitstop_runtime.saver import NullSaver, ParameterCheck, Saver  # noqa: E402

FACTS = Facts(
    role="actor",
    colocated=True,
    fully_async=False,
    uses_critic=False,
    uses_cuda_graphs=False,
    weights_backed_up=True,
    weight_transfer="ipc",
)


def train(job: dict[str, Any], rank: int, world_size: int, rendezvous: str) -> dict[str, Any]:
    """One rank's run."""
    join_world(
        rank, world_size, rendezvous, "gloo" if job["plan"] is None else pitstop_runtime.groups.BACKEND_NAME
    )
    saver = _saver() if job.get("saver") else None
    trainer = Trainer(TrainOptions(**job["options"]))
    records: list[StepRecord] = []
    manager = _manager(job, trainer, saver, records) if job["plan"] else None
    answer: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "digests": [],
        "exports": [],
        "states": [],
        "paused": [],
    }
    for step in range(job["steps"]):
        with manager.training() if manager else contextlib.nullcontext():
            loss, norm = trainer.step()
        answer["losses"].append(loss)
        answer["norms"].append(norm)
        answer["digests"].append(trainer.digest())
        if step == job["steps"] - 1:
            break
        if manager is None:
            answer["exports"].append(export(trainer))
            continue
        with manager.sleeping(step):
            answer["states"].append(manager.state.value)
            answer["paused"].append(saver.saved_bytes() if saver else None)
            manager.update_weights(lambda _: answer["exports"].append(export(trainer)))
    if manager:
        answer["stage"] = manager.enabling.stage.value
        answer["reason"] = manager.enabling.reason
        answer["live"] = len([c for c in pitstop_runtime.groups.registry.communicators() if c.used])
        manager.shutdown()
        answer["records"] = [record.model_dump(mode="json") for record in records]
    return answer


def export(trainer: Trainer) -> str:
    """Gather a weight over tensor-parallel ranks and, with experts, over expert-parallel ranks; a hash of both.

    The weights are read from a copy that a paused trainer still has (a backup on the host).
    """
    digest = hashlib.sha256()
    groups = [parallel_state.get_tensor_model_parallel_group()]
    if trainer.options.ep > 1:
        groups.append(parallel_state.get_expert_model_parallel_group())
    shard = torch.full((64,), float(dist.get_rank()))
    for group in groups:
        whole = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(whole, shard, group=group)
        digest.update(torch.cat(whole).numpy().tobytes())
    return digest.hexdigest()


def _manager(
    job: dict[str, Any], trainer: Trainer, saver: Saver | None, records: list[StepRecord]
) -> SwitchManager:
    check = ParameterCheck(trainer.model.named_parameters) if saver else None
    limits = Limits(timeout_s=20.0, canary_s=10.0, cooldown_s=job.get("cooldown_s", 0.02))
    return SwitchManager(
        job["plan"],
        saver=saver or _PretendSaver(),
        facts=FACTS,
        settings=Settings(limits=limits, clear_memory=False),
        check=check,
        on_record=records.append,
    )


class _PretendSaver(NullSaver):
    """Pauses nothing, but passes for the saver that the gates ask for."""

    name = TORCH_MEMORY_SAVER


def _saver() -> Saver:
    from fake_cuda.megatron import adopt_megatron_buffers
    from fake_cuda.saver import stand_in_saver

    saver = stand_in_saver(tags=("default", "weights", "gradients", "optimizer"))
    adopt_megatron_buffers(saver)
    return saver


def main() -> None:
    """Answer each line of the standard input with one line."""
    for line in sys.stdin:
        job = json.loads(line)
        print(
            json.dumps(run_ranks(partial(train, job), job["world_size"], job.get("timeout_s", 120.0))),
            flush=True,
        )


if __name__ == "__main__":
    main()
