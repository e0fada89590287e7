"""Managed groups over NCCL, checked on the ranks themselves.

Run by ``test_groups_nccl.py``, or without pytest:

    export PYTHONPATH=core:runtime NCCL_MULTI_RANK_GPU_ENABLE=1   # LD_PRELOAD=.../libnccl.so.2 of 2.30 or newer
    torchrun --standalone --nproc-per-node 2 tests/gpu/groups_nccl.py --gpus 1

The first rank prints a line ``RESULT {"check": ..., "problems": [...], "facts": [...]}`` for each check: what is wrong
on any rank, and what each rank saw. Exits with 1 if anything is wrong. Without a GPU the checks run over gloo, those
left out that need NCCL: to try them out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from nccl_world import CHECKS, TIMEOUT, NotHereError, World

from pitstop_runtime.groups import BACKEND_NAME

for _name in ("groups", "transfers", "ends"):  # in the order in which they are run
    importlib.import_module(f"nccl_{_name}")


def run(world: World, name: str) -> dict[str, Any]:
    """One check on this rank."""
    try:
        return {"facts": CHECKS[name](world), "problem": None}
    except NotHereError as why:
        return {"facts": None, "problem": None, "left_out": str(why)}
    except Exception:
        return {"facts": None, "problem": traceback.format_exc()}


def report(world: World, name: str) -> bool:
    """Run a check on all ranks and print what they found; whether all is well."""
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, run(world, name), group=world.control)
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(found) if each["problem"]]
    if world.rank == 0:
        line = {"check": name, "problems": problems, "facts": [each["facts"] for each in found]}
        if "left_out" in found[0]:
            line["left_out"] = found[0]["left_out"]
        print("RESULT " + json.dumps(line), flush=True)
    return not problems


def main() -> int:
    """Join the world and run the checks, in the order of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=0, help="how many to spread the ranks over; 0: all")
    parser.add_argument("--only", nargs="*", default=list(CHECKS), choices=list(CHECKS), help="run these")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        count = options.gpus or torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % count)
    dist.init_process_group(BACKEND_NAME, timeout=TIMEOUT)
    world = World()
    well = [report(world, name) for name in options.only]
    world.agree()
    dist.destroy_process_group()
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
