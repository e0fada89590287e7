"""Gates on versions and settings of torch, NCCL and the saver.

A version is compared by its release numbers only: 2.29.7rc1 counts as 2.29.7.
"""

from __future__ import annotations

from typing import Final

from pitstop.gates.facts import (
    ALLOC_CONF,
    NCCL_CUMEM_ENABLE,
    NCCL_DISABLE_MEM_MANAGER,
    NCCL_MULTI_RANK_GPU_ENABLE,
    NCCL_NVLS_ENABLE,
    NO_SAVER,
    Facts,
)
from pitstop.gates.gate import (
    Finding,
    Gate,
    any_plan,
    departs,
    found_closed,
    found_open,
    not_known,
    number_of,
    release_of,
    survives_or_retains,
    suspends,
)

TORCH_RANGE: Final = ((2, 11), (2, 15))
"""First release that the runtime supports, and first that it does not know: those of pyproject.toml."""
TORCH_SUSPEND: Final = (2, 12)
NCCL_SUSPEND: Final = (2, 29, 7)
NCCL_MULTI_RANK: Final = (2, 30)
SAVER_FROM: Final = (0, 0, 10)


def _torch_range(facts: Facts) -> Finding:
    version = release_of(facts.torch)
    if version is None:
        return not_known(
            _named("torch", facts.torch), "Give versions.torch in the scenario; checked in the trainer."
        )
    first, after = TORCH_RANGE
    if first <= version < after:
        return found_open(f"torch {facts.torch}")
    return found_closed(f"torch {facts.torch}", "Use torch 2.11 to 2.14, or reload.")


def _suspend_support(facts: Facts) -> Finding:
    if facts.backend == "gloo":
        return found_closed("gloo", "Suspending is NCCL's; use keep or reload.")
    version = release_of(facts.nccl)
    if version is None:
        remedy = "Give versions.nccl in the scenario; checked in the trainer."
        return not_known(_named("NCCL", facts.nccl), remedy)
    if version < NCCL_SUSPEND:
        remedy = (
            "Load NCCL 2.29.7 or newer (check what is loaded, not what is installed: verl-project/verl#6621), "
            "or use lean."
        )
        return found_closed(f"NCCL {facts.nccl}", remedy)
    torch = release_of(facts.torch)
    how = "by torch" if torch is not None and torch >= TORCH_SUSPEND else "by a call into the library"
    return found_open(f"NCCL {facts.nccl}, suspended {how}")


def _suspend_memory(facts: Facts) -> Finding:
    environment = facts.environment
    if environment is None:
        return not_known()
    if number_of(environment.get(NCCL_DISABLE_MEM_MANAGER), 0) != 0:
        return found_closed(
            f"{NCCL_DISABLE_MEM_MANAGER} is set", f"Unset {NCCL_DISABLE_MEM_MANAGER}, or use lean."
        )
    if number_of(environment.get(NCCL_CUMEM_ENABLE), 1) == 0:
        remedy = f"Unset {NCCL_CUMEM_ENABLE} in the trainer's environment, or use lean."
        return found_closed(f"{NCCL_CUMEM_ENABLE}=0", remedy)
    return found_open("cuMem is not turned off")


def _saver_version(facts: Facts) -> Finding:
    version = release_of(facts.saver)
    if version is None:
        remedy = "Give versions.saver in the scenario; checked in the trainer."
        return not_known(_named("torch_memory_saver", facts.saver), remedy)
    if version < SAVER_FROM:
        return found_closed(f"torch_memory_saver {facts.saver}", "Use 0.0.10 or newer, or reload.")
    return found_open(f"torch_memory_saver {facts.saver}")


def _saver_hooked(facts: Facts) -> Finding:
    if facts.saver_name == NO_SAVER:
        return found_open("no saver")
    if facts.saver_preloaded is None:
        return not_known()
    if facts.saver_preloaded:
        return found_open("hooked")
    remedy = "Start the trainer with the saver's library in LD_PRELOAD, exactly once, or with its mode torch."
    return found_closed("the saver's hook is not in the process", remedy)


def _expandable_segments(facts: Facts) -> Finding:
    if facts.saver_name == NO_SAVER:
        return found_open("no saver")
    if facts.environment is None:
        return not_known()
    for name in ALLOC_CONF:
        settings = facts.environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return found_closed(
                f"{name} has expandable_segments:True", f"Take expandable_segments out of {name}."
            )
    return found_open("not set")


def _ranks_per_gpu(facts: Facts) -> Finding:
    ranks, environment = facts.ranks_per_gpu, facts.environment
    if ranks is None:
        return not_known()
    if ranks == 1 or facts.backend == "gloo":
        return found_open("one rank per GPU" if ranks == 1 else "gloo")
    version = release_of(facts.nccl)
    if version is not None and version < NCCL_MULTI_RANK:
        return found_closed(f"{ranks} ranks per GPU, NCCL {facts.nccl}", "Load NCCL 2.30 or newer.")
    if environment is not None and number_of(environment.get(NCCL_MULTI_RANK_GPU_ENABLE), 0) == 0:
        seen = f"{ranks} ranks per GPU, {NCCL_MULTI_RANK_GPU_ENABLE} is off"
        return found_closed(seen, f"Set {NCCL_MULTI_RANK_GPU_ENABLE}=1.")
    if environment is not None and number_of(environment.get(NCCL_NVLS_ENABLE), 2) == 1:
        seen = f"{ranks} ranks per GPU, {NCCL_NVLS_ENABLE}=1"
        return found_closed(seen, f"Set {NCCL_NVLS_ENABLE}=0.")
    if version is None or environment is None:
        remedy = f"Needs NCCL 2.30 and {NCCL_MULTI_RANK_GPU_ENABLE}=1."
        return not_known(f"{ranks} ranks per GPU, {_named('NCCL', facts.nccl)}", remedy)
    return found_open(f"{ranks} ranks per GPU, NCCL {facts.nccl}")


def _named(what: str, version: str | None) -> str:
    return f"version of {what} not known" if version is None else f"{what} {version}"


SOFTWARE_GATES: Final = (
    Gate(
        "torch-range",
        "torch is one of 2.11 to 2.14",
        "The runtime takes groups over by parts of torch that have changed before; other releases are untested.",
        "pyproject.toml; that 2.14 works is a promise of the tests, not of a report",
        departs,
        _torch_range,
    ),
    Gate(
        "suspend-support",
        "NCCL can suspend communicators",
        "ncclCommSuspend came with NCCL 2.29.7. torch has a call for it since 2.12, but needs that NCCL all the same.",
        "NVIDIA/nccl#2337, pytorch/pytorch#176300; the bundled evidence is of 2.30.7",
        suspends,
        _suspend_support,
    ),
    Gate(
        "suspend-memory",
        "NCCL's memory is of the kind that a suspend can release",
        "NCCL releases only what it has allocated by cuMem and keeps account of. Frameworks start trainers with "
        "NCCL_CUMEM_ENABLE=0 for the engine's sake, and the suspend then frees nothing.",
        "src/include/alloc.h and src/mem_manager.cc of NCCL 2.30.7, read, not tried; vllm-project/vime#103",
        suspends,
        _suspend_memory,
    ),
    Gate(
        "saver-version",
        "torch_memory_saver is 0.0.10 or newer",
        "Weights came back corrupted with 0.0.9 on H100, and 0.0.9 cannot retain its backups.",
        "fzyzcjy/torch_memory_saver#71, which is open: 0.0.10 was correct in the bundled evidence, but that it "
        "mends that fault is not confirmed",
        survives_or_retains,
        _saver_version,
    ),
    Gate(
        "saver-hooked",
        "the saver's hook is in the trainer's process",
        "Without its hook the saver sees no allocation: its first use fails, or the pause frees nothing.",
        "hooks/mode_preload.py of torch_memory_saver 0.0.10; THUDM/slime#1936",
        any_plan,
        _saver_hooked,
    ),
    Gate(
        "expandable-segments",
        "torch's allocator has no expandable segments",
        "The saver does not see memory of expandable segments. It refuses to start if the variable's old name asks "
        "for them; by the new name it does not notice, and the pause frees nothing.",
        "fzyzcjy/torch_memory_saver#24; the new name: read in torch_memory_saver 0.0.10, not tried",
        any_plan,
        _expandable_segments,
    ),
    Gate(
        "ranks-per-gpu",
        "NCCL allows several ranks per GPU, if there are any",
        "Before 2.30 NCCL refuses a communicator with two ranks on one GPU; since then it wants a variable set, and "
        "NVLS not forced.",
        "NCCL user guide, NCCL_MULTI_RANK_GPU_ENABLE; measured with 2.30.7",
        any_plan,
        _ranks_per_gpu,
    ),
)
