"""Measure whole switches under several plans, carried out by the runtime, with Megatron-core's own groups.

Run under torchrun with the memory saver and NCCL >= 2.30 preloaded (versions: evidence/README.md):

    torchrun --nproc-per-node 8 evidence/scripts/measure_switch_plans.py --layout tp4dp2 --repeat 0 --out out/

Each process measures every plan, in an order drawn from the repeat's number; a fresh process per repeat. All
groups of more than one rank are in use, as with trainers that create groups eagerly. Writes one StepRecord per
line, and a file of facts: memory of the communicators, and the bandwidth of managed groups over plain ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pitstop.gates import Facts
from pitstop.inventory.caps import SAME_GPU_CHANNELS
from pitstop.plan import NAMED_PLANS, Disposition, Plan
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
MIB = 1024**2
BUCKET = 64 * MIB
ROLLOUT_S = 2.1  # longer than the cooldown, as every real rollout is; it matters where groups were destroyed
UNMEASURED = 100_000
HOT_KINDS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
}
FACTS = Facts(
    role="actor",
    colocated=True,
    fully_async=False,
    uses_critic=False,
    uses_cuda_graphs=False,
    weights_backed_up=True,
    weight_transfer="ipc",
    deepep_loaded=False,
    nvshmem_loaded=False,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--gib", type=int, default=8, help="saved per GPU")
    parser.add_argument(
        "--cycles", type=int, default=1, help="measured switches per plan; lean ones twice that"
    )
    parser.add_argument("--plans", nargs="*", default=list(NAMED_PLANS))
    parser.add_argument("--hot-ctas", type=int, help="channel cap of hot communicators under sharing plans")
    parser.add_argument("--no-bandwidth", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    Run(parser.parse_args()).go()


class Run:
    """One fresh process's measurements, on each rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.started = time.time()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        expected, sizes = LAYOUTS[arguments.layout]
        assert self.world == expected, f"{arguments.layout} is for {expected} ranks"
        dist.init_process_group("pitstop")
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        self.control = dist.new_group(backend="gloo")
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        bytes_per_rank = arguments.gib * 1024**3 // max(1, self.world // torch.cuda.device_count())
        self.shard = bytes_per_rank // 2
        self.saver = TorchMemorySaver(host_budget_bytes=2 * bytes_per_rank)
        self.facts: dict[str, Any] = {
            "hot_max_ctas": arguments.hot_ctas,
            "ipc_own_gpu": True,  # copies map peers' memory through the own GPU, without a context on theirs
            "same_gpu_channels": SAME_GPU_CHANNELS if arguments.hot_ctas else None,
        }
        self.name = f"{arguments.layout}-{arguments.repeat}"
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            (self.out / f"{self.name}.jsonl").write_text("")
        self.step = 0
        before = self.used_mib()
        self.touch_all()
        self.facts["own_nccl_mib_per_gpu"] = self.used_mib() - before
        self.payload = [
            torch.full((bytes_per_rank // 16,), self.rank + 1, dtype=torch.uint8, device="cuda")
            for _ in range(16)
        ]
        self.manager = SwitchManager(
            "keep",
            saver=self.saver,
            facts=FACTS,
            settings=Settings(limits=Limits(timeout_s=100.0)),
            on_record=self.keep,
        )
        assert self.manager.enabling.reason is None, self.manager.enabling.reason

    def go(self) -> None:
        """Measure, write, and leave without waiting for anybody's destructors."""
        order = random.Random(self.arguments.repeat)
        wanted = [self.plan(name) for name in self.arguments.plans]
        # Plans of one wiring follow each other: training would not change it between two switches either.
        blocks = [[plan for plan in wanted if plan.share is share] for share in (False, True)]
        order.shuffle(blocks)
        self.manager.update_weights(self.export)  # proves the sync, so that plans are in force at once
        for block in filter(None, blocks):
            self.begin(self.plan("lean") if block[0].share else self.plan("keep"))
            cycle = [plan for plan in block for _ in range(self.cycles(plan))]
            order.shuffle(cycle)
            for plan in cycle:
                if not self.manager.change_plan(plan):
                    print(f"{plan.name} was refused", flush=True)
                    continue
                if block[0].share:
                    self.switch(UNMEASURED + self.step)  # its way of exporting is set up
                self.switch(self.step)
                self.step += 1
        self.manager.shutdown()
        if self.rank == 0:
            self.write()
        sys.stdout.flush()
        dist.barrier(group=self.control)
        os._exit(0)

    def plan(self, name: str) -> Plan:
        """A named plan, with the cap that was asked for."""
        plan = NAMED_PLANS[name]
        return plan.model_copy(update={"hot_max_ctas": self.arguments.hot_ctas}) if plan.share else plan

    def cycles(self, plan: Plan) -> int:
        """Measured switches: short ones more often."""
        return self.arguments.cycles * (2 if plan.share else 1)

    def begin(self, plan: Plan) -> None:
        """Wire for a plan, by a switch that is not measured, and see what training has of it."""
        self.manager.change_plan(plan)
        self.switch(UNMEASURED + self.step)
        self.touch_all()
        kind = "shared" if plan.share else "own"
        self.facts[f"{kind}_communicators"] = [
            {"groups": [h.description for h in c.handles], "max_ctas": c.max_ctas, "mib": (c.memory_bytes() or 0) / MIB}
            for c in groups.registry.communicators()
        ]  # fmt: skip
        if not self.arguments.no_bandwidth:
            self.facts[f"{kind}_bandwidth"] = self.bandwidths()

    def switch(self, step: int) -> None:
        """One switch, with a payload that has to be the same afterwards."""
        with self.manager.sleeping(step):
            self.manager.update_weights(self.export)
            if self.manager.plan.training in (Disposition.DESTROY, Disposition.DESTROY_AFTER_SYNC):
                time.sleep(ROLLOUT_S)
        assert all(bool((part[:1] == self.rank + 1).all()) for part in self.payload), "the payload changed"

    def export(self, sync: WeightSync) -> None:
        """Gather half of the saved bytes over the tensor-parallel ranks, in buckets."""
        with sync.gather(), self.saver.disabled():
            source = torch.full((BUCKET,), self.tp_group.rank(), dtype=torch.uint8, device="cuda")
            whole = torch.empty(BUCKET * self.tp_group.size(), dtype=torch.uint8, device="cuda")
            for _ in range(max(1, self.shard // BUCKET)):
                dist.all_gather_into_tensor(whole, source, group=self.tp_group)
            torch.cuda.synchronize()
        # Outside the measured part: what arrived is right.
        with self.saver.disabled():
            parts = whole.view(self.tp_group.size(), -1)
            found = [part.unique().tolist() for part in parts[:, ::4097]]
            assert found == [[rank] for rank in range(self.tp_group.size())], found
        del source, whole, parts
        torch.cuda.empty_cache()

    def used_mib(self) -> float:
        """Used on this GPU, while no rank does anything."""
        torch.cuda.synchronize()
        dist.barrier(group=self.control)
        free, total = torch.cuda.mem_get_info()
        dist.barrier(group=self.control)
        return (total - free) / MIB

    def touch_all(self) -> None:
        """One collective on every group, in the order of creation."""
        with self.saver.disabled():
            for handle in groups.registry.managed():
                dist.all_reduce(torch.ones(4, device="cuda"), group=handle)
            torch.cuda.synchronize()

    def bandwidths(self) -> dict[str, dict[str, float]]:
        """GB/s of all-reduces of 128 MiB on managed groups and on torch's own of the same ranks, in turns.

        One group while the others rest: two that share GPUs would wait for moments in which both serve the same one.
        """
        found = {}
        with self.saver.disabled():
            tensor = torch.ones(128 * MIB, dtype=torch.uint8, device="cuda")
            for kind, description in HOT_KINDS.items():
                handle = next((h for h in groups.registry.managed() if h.description == description), None)
                ranks: list[Any] = [None] * self.world
                dist.all_gather_object(ranks, None if handle is None else handle.ranks, group=self.control)
                if None in ranks:
                    continue
                rates: dict[str, list[float]] = {"managed": [], "plain": []}
                members = min(ranks)
                plain = dist.new_group(list(members), backend="nccl")
                mine = self.rank in members
                for turn in range(9):
                    pair = [("managed", handle), ("plain", plain)]
                    for name, group in pair if turn % 2 else reversed(pair):
                        action = functools.partial(reduce_thrice, tensor, group)
                        seconds = self.timed(action if mine else nothing)
                        if turn:  # the first connects
                            rates[name].append(3 * 128 * MIB / seconds / 1e9)
                if mine:
                    dist.destroy_process_group(plain)
                found[kind] = {name: round(statistics.median(values), 3) for name, values in rates.items()}
                ratios = [m / p for m, p in zip(rates["managed"], rates["plain"], strict=True)]
                found[kind]["ratio"] = round(statistics.median(ratios), 4)
        del tensor
        torch.cuda.empty_cache()
        return found

    def timed(self, action: Callable[[], Any]) -> float:
        """Seconds that the slowest rank takes."""
        torch.cuda.synchronize()
        dist.barrier(group=self.control)
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.control)
        return float(seconds)

    def keep(self, record: StepRecord) -> None:
        """Write a record at once, in a thread of rank 0: a run that is cut short has what it measured."""
        with (self.out / f"{self.name}.jsonl").open("a") as file:
            file.write(record.model_dump_json(exclude_defaults=True) + "\n")
        if record.step < UNMEASURED:
            show(record)

    def write(self) -> None:
        """Facts, and a summary of them."""
        self.facts["seconds"] = round(time.time() - self.started)
        (self.out / f"{self.name}.json").write_text(json.dumps(self.facts))
        communicators = {k: v for k, v in self.facts.items() if k.endswith("communicators")}
        summary = {
            key: f"{len(found)}: {sum(c['mib'] for c in found):.0f} MiB"
            for key, found in communicators.items()
        }
        print(
            self.name, {k: v for k, v in self.facts.items() if k not in communicators} | summary, flush=True
        )


def nothing() -> None:
    """What a rank does while others measure."""


def reduce_thrice(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Back to back, so that the launch is not what is measured."""
    for _ in range(3):
        dist.all_reduce(tensor, group=group)


def show(record: StepRecord) -> None:
    """One line of a record."""
    parts = {
        f"{phase.value[:6]}/{component.value}": round(seconds, 3)
        for phase, found in record.phases.items()
        for component, seconds in found.components_s.items()
        if seconds >= 0.005
    }
    beside = {
        f"{phase.value[:6]}/{component.value}": round(seconds, 3)
        for phase, found in record.phases.items()
        for component, seconds in found.overlapped_s.items()
        if seconds >= 0.005
    }
    memory = record.memory
    held = [(b or 0) // MIB for b in (memory.held_at_sync_bytes, memory.held_in_rollout_bytes)]
    fallback = record.fallback or ""
    print(f"{record.plan:15s} {record.switch_s:7.3f} s {held} {parts} beside {beside}", fallback, flush=True)


if __name__ == "__main__":
    main()
