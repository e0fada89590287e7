"""Managed groups over NCCL: ``groups_nccl.py`` checks them on its ranks, this asks for each of its answers.

    python -m pytest tests/gpu

needs ``core`` and ``runtime`` installed or on ``PYTHONPATH``. More ranks than GPUs need NCCL 2.30 or newer, preloaded
(``LD_PRELOAD``). How to run the ranks without pytest: see ``groups_nccl.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 400
_SHARING_A_GPU = (2, 30, 0)

CHECKS = (
    "collectives",
    "collectives_after_rebuilds",
    "collectives_over_one_shared_and_capped",
    "training_with_rebuilds_between",
    "a_released_group_raises_at_once",
    "a_release_gives_memory_back",
    "suspend_and_resume",
    "options_survive_rebuilds",
    "caps_take_less_memory",
    "a_bound_device_survives_rebuilds",
    "a_group_of_one_rank_is_torchs_own",
    "batches_are_coalesced",
    "torchs_own_batches_over_a_handle_are_not",
    "export_by_copies",
    "export_over_a_communicator",
    "a_suspended_communicator_can_be_destroyed",
    "an_abort_ends_what_waits",
)


@cache
def answers(ranks: int, gpus: int) -> dict[str, Any]:
    """What the ranks found, by check; and under ``log`` what else they said."""
    paths = [str(_HERE.parents[1] / name) for name in ("core", "runtime")]
    environment = os.environ | {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(_HERE / "groups_nccl.py"), f"--gpus={gpus}"]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        output = ended.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else str(error.stdout or "")
    lines = [line for line in output.splitlines() if "RESULT " in line]
    found = [json.loads(line.partition("RESULT ")[2]) for line in lines]
    return {each["check"]: each for each in found} | {"log": output[-4000:]}


@pytest.mark.parametrize(("ranks", "used"), [(2, 1), (2, 2), (4, 2)], ids=["2on1", "2on2", "4on2"])
@pytest.mark.parametrize("check", CHECKS)
def test_managed_groups(gpus: int, ranks: int, used: int, check: str) -> None:
    from pitstop_runtime.groups.nccl import runtime_version

    if gpus < used:
        pytest.skip(f"needs {used} GPUs, found {gpus}")
    if ranks > used and (runtime_version() or ()) < _SHARING_A_GPU:
        pytest.skip("several ranks per GPU need NCCL 2.30 or newer: preload it")
    found = answers(ranks, used)
    assert check in found, f"the ranks ended before this check:\n{found['log']}"
    assert found[check]["problems"] == []
    if "left_out" in found[check]:
        pytest.skip(found[check]["left_out"])


def test_every_check_is_asked_for() -> None:
    source = "".join((_HERE / f"nccl_{part}.py").read_text() for part in ("groups", "transfers", "ends"))
    marked = [part.partition("(")[0] for part in source.split("@check\ndef ")[1:]]
    assert tuple(marked) == CHECKS
