"""Measure creation, memory and release of NCCL communicators, one by one, and the memory of a bare CUDA process.

Run on one machine with at least two GPUs, under torchrun with two processes:

    torchrun --nproc-per-node 2 evidence/scripts/measure_communicators.py --repeat 0 --out communicators-0.csv

Cells (channel cap x number of communicators) come in random order; before each release the process waits a random
time, because NCCL's proxy threads poll with a 500 ms timeout (src/proxy.cc) and the phase of that poll matters.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import time

import pynvml
import torch
import torch.distributed as dist

MIB = 1024**2
CELLS = [(cap, count) for cap in (None, 1, 2, 4, 8) for count in (1, 2, 3, 6, 10)]


def nvml_used_mib(device: int) -> float:
    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(device)).used) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    rank, device = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    before = nvml_used_mib(device)
    torch.cuda.set_device(device)
    torch.ones(1, device="cuda").item()
    torch.cuda.synchronize()
    after = nvml_used_mib(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    control = dist.new_group(backend="gloo")
    rows: list[dict[str, object]] = []

    def used_mib() -> float:
        torch.cuda.synchronize()
        dist.barrier(group=control)
        free, total = torch.cuda.mem_get_info()
        dist.barrier(group=control)
        return (total - free) / MIB

    def slowest(seconds: list[float]) -> list[float]:
        gathered: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seconds, group=control)
        return [max(column) for column in zip(*gathered, strict=True)]  # type: ignore[call-overload]

    def record(
        op: str, cap: int | None, count: int, seconds: float, mib: float | None, each: list[float]
    ) -> None:
        rows.append(
            {
                "run": arguments.repeat,
                "op": op,
                "max_ctas": cap or "",
                "communicators": count,
                "seconds": round(seconds, 4),
                "mib": "" if mib is None else round(mib),
                "each_s": " ".join(f"{value:.4f}" for value in each),
            }
        )

    record("context", None, 0, 0.0, after - before, [])
    base = used_mib()
    order = random.Random(arguments.repeat)
    cells = CELLS[:]
    order.shuffle(cells)
    for index, (cap, count) in enumerate([(None, 1), *cells]):
        options = dist.ProcessGroupNCCL.Options()
        if cap is not None:
            options.config.min_ctas, options.config.max_ctas = 1, cap
        dist.barrier(group=control)
        start_mib = used_mib()
        groups, each = [], []
        start = time.perf_counter()
        for _ in range(count):
            tick = time.perf_counter()
            group = dist.new_group([0, 1], backend="nccl", pg_options=options)
            dist.all_reduce(torch.ones(4, device="cuda"), group=group)
            torch.cuda.synchronize()
            groups.append(group)
            each.append(time.perf_counter() - tick)
        total = time.perf_counter() - start
        each, (total,) = slowest(each), slowest([total])
        held_mib = used_mib()
        record("create_cold" if index == 0 else "create", cap, count, total, held_mib - start_mib, each)
        time.sleep(order.uniform(0.0, 1.0))
        dist.barrier(group=control)
        each, start = [], time.perf_counter()
        for group in groups:
            tick = time.perf_counter()
            dist.destroy_process_group(group)
            each.append(time.perf_counter() - tick)
        total = time.perf_counter() - start
        each, (total,) = slowest(each), slowest([total])
        record("destroy", cap, count, total, held_mib - used_mib(), each)
        if index == 0:
            record("process_residual", None, 0, 0.0, used_mib() - base, [])
    if rank == 0:
        with open(arguments.out, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier(group=control)
    os._exit(0)


if __name__ == "__main__":
    main()
