"""What the gates look at: one record, each field None where it is not known.

Offline most fields are unknown: ``facts_of`` states what a scenario states and assumes nothing. The runtime
starts from the same record and replaces what it can read in the trainer's process. NCCL also reads
``/etc/nccl.conf`` and ``~/.nccl.conf``: whoever sets its variables there has to add them to ``environment``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pitstop.hardware import Link
from pitstop.scenario import EngineName, Hardware, Scenario
from pitstop.sizing import size_scenario

NCCL_NVLS_ENABLE: Final = "NCCL_NVLS_ENABLE"
NCCL_GRAPH_REGISTER: Final = "NCCL_GRAPH_REGISTER"
NCCL_CUMEM_ENABLE: Final = "NCCL_CUMEM_ENABLE"
NCCL_DISABLE_MEM_MANAGER: Final = "NCCL_DISABLE_MEM_MANAGER"
NCCL_MULTI_RANK_GPU_ENABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
REGISTER_ALL_TENSORS: Final = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
ALLOC_CONF: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The allocator's settings, by its old and its new name."""

_NAMES = frozenset(
    {
        NCCL_NVLS_ENABLE,
        NCCL_GRAPH_REGISTER,
        NCCL_CUMEM_ENABLE,
        NCCL_DISABLE_MEM_MANAGER,
        NCCL_MULTI_RANK_GPU_ENABLE,
        *ALLOC_CONF,
    }
)

TORCH_MEMORY_SAVER: Final = "torch_memory_saver"
NO_SAVER: Final = "none"
NOBODY: Final = ""
"""Value of ``double_wrapped_by`` where no other library wraps the groups; None there means: not known."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a gate looks at; None: not known.

    Attributes:
        world_size: trainer ranks in all.
        nodes: nodes that the trainer's ranks are on.
        ranks_per_gpu: trainer ranks that share one GPU.
        gpu: name of the GPU model.
        accelerator: "cuda", "rocm", "klx", "cpu" ...
        nvls_supported_by_gpu: whether GPU and switch can do NVLink SHARP.
        single_rank_groups_only: every group has one rank, so that there is no communicator to manage.
        parallel_sizes: the layout's sizes by kind: "tp", "pp", "cp", "ep", "dp".
        torch: version of torch.
        nccl: version that the loaded library answers, not that of an installed package.
        saver: version of torch_memory_saver.
        megatron: version of megatron-core.
        driver: version of the GPU's driver.
        backend: what carries the trainer's collectives: "nccl" or "gloo".
        environment: variables that matter and are set, see ``relevant_environment``.
        saver_name: ``TORCH_MEMORY_SAVER``, ``NO_SAVER`` or another.
        saver_preloaded: the saver's hook is in the process: by LD_PRELOAD, or by its mode "torch".
        double_wrapped_by: library that has already wrapped the groups, or ``NOBODY``.
        deepep_loaded: a DeepEP buffer is alive when groups are released; False if the trainer frees it first.
        nvshmem_loaded: the same for NVSHMEM's symmetric memory.
        uses_cuda_graphs: the trainer replays CUDA graphs that hold collectives.
        split_share_communicators: communicators were split off with shared resources (splitShare).
        role: what this group of ranks trains: "actor", "critic" ...
        colocated: trainer and rollout engine take turns on the same GPUs.
        offloads_trainer: the trainer's memory is paused while the engine has the GPUs.
        fully_async: training and rollout run at the same time instead of in turns.
        uses_critic: a critic is trained on the same GPUs.
        weights_backed_up: weights have a copy from which they can be exported while the memory is paused.
        weight_transfer: how weights reach the engine: "ipc", "nccl", "disk" ...
        canary_covers: kinds of groups that the canary checks; None: Pitstop's own, which checks every kept one.
        cross_node_canary_passed: kept communicators between nodes worked after a pause, on this hardware and NCCL.
        driver_free_bytes: free device memory of the fullest GPU by the driver, not by torch.
        needed_bytes: device bytes that the plan has to find free there.
        host_available_bytes: host memory of a node that can still be allocated.
        host_backup_bytes: pinned host memory of a node that retained backups take.
    """

    world_size: int | None = None
    nodes: int | None = None
    ranks_per_gpu: int | None = None
    gpu: str | None = None
    accelerator: str | None = None
    nvls_supported_by_gpu: bool | None = None
    single_rank_groups_only: bool | None = None
    parallel_sizes: Mapping[str, int] | None = None
    torch: str | None = None
    nccl: str | None = None
    saver: str | None = None
    megatron: str | None = None
    driver: str | None = None
    backend: str | None = None
    environment: Mapping[str, str] | None = None
    saver_name: str | None = None
    saver_preloaded: bool | None = None
    double_wrapped_by: str | None = None
    deepep_loaded: bool | None = None
    nvshmem_loaded: bool | None = None
    uses_cuda_graphs: bool | None = None
    split_share_communicators: bool | None = None
    role: str | None = None
    colocated: bool | None = None
    offloads_trainer: bool | None = None
    fully_async: bool | None = None
    uses_critic: bool | None = None
    weights_backed_up: bool | None = None
    weight_transfer: str | None = None
    canary_covers: frozenset[str] | None = None
    cross_node_canary_passed: bool | None = None
    driver_free_bytes: int | None = None
    needed_bytes: int | None = None
    host_available_bytes: int | None = None
    host_backup_bytes: int | None = None


def facts_of(scenario: Scenario) -> Facts:
    """What a scenario states; everything else stays unknown until a trainer answers.

    Raises:
        InvalidScenarioError: the model cannot be sharded as the layout says.
    """
    hardware, layout, versions = scenario.hardware, scenario.layout, scenario.versions
    cuda = hardware.model.architecture.startswith("sm_")
    return Facts(
        world_size=scenario.world_size,
        nodes=hardware.nodes,
        ranks_per_gpu=hardware.ranks_per_gpu,
        gpu=hardware.gpu,
        accelerator="cuda" if cuda else "rocm",
        nvls_supported_by_gpu=supports_nvls(hardware),
        single_rank_groups_only=scenario.world_size == 1,
        parallel_sizes={
            "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": scenario.dp,
        },
        torch=versions.torch,
        nccl=versions.nccl,
        saver=versions.saver,
        megatron=versions.megatron,
        driver=versions.driver,
        backend="nccl" if cuda else None,
        saver_name=TORCH_MEMORY_SAVER if versions.saver else None,
        colocated=True if scenario.engine.name is not EngineName.NONE else None,
        host_backup_bytes=size_scenario(scenario).saved_bytes * hardware.ranks_per_node,
    )  # fmt: skip


def supports_nvls(hardware: Hardware) -> bool:
    """Whether GPU and switch can do NVLink SHARP: Hopper or later, behind NVSwitch (NCCL user guide)."""
    architecture = hardware.model.architecture.removeprefix("sm_")
    return architecture.isdecimal() and int(architecture) >= 90 and hardware.intra_node_link is Link.NVSWITCH


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that gates may look at; to be called with ``os.environ``."""
    return {
        name: value for name, value in environ.items() if name in _NAMES or name.startswith("TORCH_NCCL_")
    }
