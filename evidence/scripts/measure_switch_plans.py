"""Measure whole switches under several plans, carried out by the runtime, with Megatron-core's own groups.

Run under torchrun with the memory saver and NCCL >= 2.30 preloaded (versions: evidence/pending/README.md):

    torchrun --nproc-per-node 8 evidence/scripts/measure_switch_plans.py --layout tp4dp2 --repeat 0 --out out/

Each process measures every plan, in an order drawn from the repeat's number; a fresh process per repeat. All
groups of more than one rank are in use, as with trainers that create groups eagerly. Writes one StepRecord per
line, and one line of bandwidths and communicator memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pitstop.gates import Facts
from pitstop.plan import NAMED_PLANS
from pitstop.telemetry import StepRecord
from pitstop_runtime import groups
from pitstop_runtime.executor import Limits
from pitstop_runtime.manager import Settings, SwitchManager
from pitstop_runtime.saver import TorchMemorySaver
from pitstop_runtime.sync import WeightSync

LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2dp2": (4, {"tensor_model_parallel_size": 2}),
    "tp4dp2": (8, {"tensor_model_parallel_size": 4}),
    "tp4cp2ep8": (
        8,
        {
            "tensor_model_parallel_size": 4,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "tp2pp2dp2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}
PLANS = ("reload", "reload-deferred", "keep-window", "keep", "suspend", "lean", "lean-released")
MIB = 1024**2
BUCKET = 64 * MIB
ROLLOUT_S = 2.1  # the engine's turn: longer than the cooldown, as every real rollout is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--gib", type=int, default=8, help="saved per GPU")
    parser.add_argument("--cycles", type=int, default=1, help="measured switches per plan")
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.time()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    expected, sizes = LAYOUTS[arguments.layout]
    assert world == expected, f"{arguments.layout} is for {expected} ranks"
    dist.init_process_group("pitstop")
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    control = dist.new_group(backend="gloo")
    ranks_per_gpu = max(1, world // torch.cuda.device_count())

    def used_mib() -> float:
        torch.cuda.synchronize()
        dist.barrier(group=control)
        free, total = torch.cuda.mem_get_info()
        dist.barrier(group=control)
        return (total - free) / MIB

    saver = TorchMemorySaver(host_budget_bytes=2 * arguments.gib * 1024**3 // ranks_per_gpu)
    before = used_mib()
    touch_all(saver)
    default_mib = used_mib() - before
    payload = [
        torch.full(
            (arguments.gib * 1024**3 // ranks_per_gpu // 16,), rank + 1, dtype=torch.uint8, device="cuda"
        )
        for _ in range(16)
    ]
    records: list[StepRecord] = []
    manager = SwitchManager(
        "keep",
        saver=saver,
        facts=Facts(
            role="actor",
            colocated=True,
            fully_async=False,
            uses_critic=False,
            uses_cuda_graphs=False,
            weights_backed_up=True,
            weight_transfer="ipc",
            deepep_loaded=False,
            nvshmem_loaded=False,
        ),
        settings=Settings(limits=Limits(timeout_s=100.0)),
        on_record=records.append,
    )
    if rank == 0:
        print("gates:", manager.enabling.stage, manager.enabling.reason, flush=True)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    shard = arguments.gib * 1024**3 // 2 // ranks_per_gpu

    def export(sync: WeightSync) -> None:
        with sync.gather(), saver.disabled():
            source = torch.ones(BUCKET, dtype=torch.uint8, device="cuda")
            whole = torch.empty(BUCKET * tp_group.size(), dtype=torch.uint8, device="cuda")
            for _ in range(max(1, shard // BUCKET)):
                dist.all_gather_into_tensor(whole, source, group=tp_group)
            torch.cuda.synchronize()
            del source, whole
        torch.cuda.empty_cache()

    def switch(step: int) -> None:
        with manager.sleeping(step):
            manager.update_weights(export)
            time.sleep(ROLLOUT_S)
        assert all(bool((part[:1] == rank + 1).all()) for part in payload), "the payload changed"

    # Plans of one wiring follow each other: training would not change it between two switches either.
    order = random.Random(arguments.repeat)
    blocks = [[p for p in arguments.plans if NAMED_PLANS[p].share is share] for share in (False, True)]
    order.shuffle(blocks)
    step, facts = 0, {"default_mib": default_mib}
    for block in blocks:
        if not block:
            continue
        order.shuffle(block)
        shared = NAMED_PLANS[block[0]].share
        manager.change_plan(NAMED_PLANS["lean" if shared else "keep"])
        switch(100_000 + step)  # not measured: the first of its wiring
        touch_all(saver)
        facts["shared_mib" if shared else "own_mib"] = used_mib()
        facts["shared_gb_s" if shared else "own_gb_s"] = bandwidth(tp_group, saver)
        cycle = [name for name in block for _ in range(arguments.cycles)]
        order.shuffle(cycle)
        for name in cycle:
            if not manager.change_plan(NAMED_PLANS[name]):
                print(f"{name} was refused", flush=True)
                continue
            if name == "lean-released":
                switch(200_000 + step)  # makes the export communicators
                facts["released_active_mib"] = used_mib()
            switch(step)
            step += 1
    # The same collective on a group that torch made itself, with the ranks of the tensor-parallel group.
    size = tp_group.size()
    for first in range(0, world, size):
        plain = dist.new_group(list(range(first, first + size)), backend="nccl")
        if rank in range(first, first + size):
            mine = plain
    facts["unmanaged_gb_s"] = bandwidth(mine, saver)
    facts["shared_gb_s_again"] = bandwidth(tp_group, saver)
    manager.shutdown()
    if rank == 0:
        write(arguments, records, facts, manager)
        print(
            f"{arguments.layout} repeat {arguments.repeat}: {time.time() - started:.0f} s", facts, flush=True
        )
    sys.stdout.flush()
    dist.barrier(group=control)
    os._exit(0)


def touch_all(saver: TorchMemorySaver) -> None:
    """One collective on every group, in the order of creation."""
    with saver.disabled():
        for handle in groups.registry.managed():
            dist.all_reduce(torch.ones(4, device="cuda"), group=handle)
        torch.cuda.synchronize()


def bandwidth(group: dist.ProcessGroup, saver: TorchMemorySaver) -> float:
    """GB/s of an all-reduce of 256 MiB, best of five."""
    with saver.disabled():
        tensor = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
        best = float("inf")
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        del tensor
    torch.cuda.empty_cache()
    return 256 * MIB / best / 1e9


def write(
    arguments: argparse.Namespace, records: list[StepRecord], facts: dict[str, float], manager: SwitchManager
) -> None:
    name = f"{arguments.layout}-{arguments.repeat}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / f"{name}.jsonl").open("w") as file:
        file.writelines(record.model_dump_json(exclude_defaults=True) + "\n" for record in records)
    (arguments.out / f"{name}.json").write_text(json.dumps({"reason": manager.enabling.reason, **facts}))
    for record in records:
        if record.step < 100_000:
            phases = {p.value: round(r.total_s, 3) for p, r in record.phases.items()}
            parts = {
                f"{p.value}/{c.value}": round(s, 3)
                for p, r in record.phases.items()
                for c, s in r.components_s.items()
            }
            beside = {
                f"{p.value}/{c.value}": round(s, 3)
                for p, r in record.phases.items()
                for c, s in r.overlapped_s.items()
            }
            held = [
                (b or 0) // MIB
                for b in (record.memory.held_at_sync_bytes, record.memory.held_in_rollout_bytes)
            ]
            print(
                f"{record.plan:16s} {record.switch_s:7.3f} s {held} MiB {phases} {parts} beside {beside}",
                record.fallback or "",
                flush=True,
            )


if __name__ == "__main__":
    main()
