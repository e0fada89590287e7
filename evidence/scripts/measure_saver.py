"""Measure pause and resume of torch_memory_saver by size and by backup rule, in one fresh process per call.

Run with the saver's preload library (TMS_INIT_ENABLE=1, TMS_INIT_ENABLE_CPU_BACKUP=1):

    python evidence/scripts/measure_saver.py --repeat 0 --out saver-0.csv
"""

from __future__ import annotations

import argparse
import csv
import random
import time

import torch
from torch_memory_saver import torch_memory_saver as saver

GIB = 1024**3
TENSORS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    sizes = [1, 4, 8]
    random.Random(arguments.repeat).shuffle(sizes)
    for backup in ("reallocate", "retain"):
        saver.retain_cpu_backup = backup == "retain"
        for size_gib in sizes:
            size = (size_gib * GIB // TENSORS,)
            payload = [torch.full(size, i, dtype=torch.uint8, device="cuda") for i in range(TENSORS)]
            for cycle in range(3):
                torch.cuda.synchronize()
                free, _ = torch.cuda.mem_get_info()
                start = time.perf_counter()
                saver.pause()
                torch.cuda.synchronize()
                paused = time.perf_counter()
                freed = torch.cuda.mem_get_info()[0] - free
                middle = time.perf_counter()
                saver.resume()
                torch.cuda.synchronize()
                resumed = time.perf_counter()
                intact = all(bool((tensor[:1] == i).all()) for i, tensor in enumerate(payload))
                rows.append(
                    {
                        "run": arguments.repeat,
                        "backup": backup,
                        "payload_gib": size_gib,
                        "cycle": cycle,
                        "pause_s": round(paused - start, 4),
                        "resume_s": round(resumed - middle, 4),
                        "freed_bytes": freed,
                        "intact": intact,
                    }
                )
            del payload
            torch.cuda.empty_cache()
    with open(arguments.out, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
