"""What the gates look at, read in the trainer's process."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from pitstop.gates import NO_SAVER, NOBODY, TORCH_MEMORY_SAVER, Facts, relevant_environment
from pitstop_runtime.control import Control
from pitstop_runtime.errors import SaverError
from pitstop_runtime.groups import ManagedGroup, Registry, nccl
from pitstop_runtime.saver import Saver, available_host_bytes
from pitstop_runtime.saver.preload import check_preload

_FOREIGN_WRAPPERS = ("reloadable_process_group",)


def live_facts(stated: Facts, registry: Registry, control: Control, saver: Saver) -> Facts:
    """``stated`` with everything that can be seen filled in: what is seen wins over what was said.

    Every rank has to call it: ranks count nodes and ranks per GPU together.
    """
    places = control.union([f"{socket.gethostname()}|{_gpu()}|{dist.get_rank()}"])
    registry.devices = {int(rank): device for device, rank in (place.rsplit("|", 1) for place in places)}
    saved_bytes = saver.saved_bytes()
    nodes = {place.split("|")[0] for place in places}
    gpus = [place.rsplit("|", 1)[0] for place in places]
    cuda = torch.cuda.is_available()
    handles = registry.managed()
    return replace(
        stated,
        world_size=dist.get_world_size(),
        nodes=len(nodes),
        ranks_per_gpu=max(gpus.count(gpu) for gpu in set(gpus)) if cuda else 1,
        accelerator="cuda" if cuda else "cpu",
        single_rank_groups_only=not handles,
        parallel_sizes=_parallel_sizes(handles),
        torch=torch.__version__,
        nccl=".".join(map(str, nccl.runtime_version() or ())) or None,
        saver=_version("torch_memory_saver"),
        megatron=_version("megatron-core"),
        backend="nccl" if cuda else "gloo",
        environment=relevant_environment(os.environ),
        saver_name=TORCH_MEMORY_SAVER if saver.name == TORCH_MEMORY_SAVER else NO_SAVER,
        saver_preloaded=_preloaded(saver),
        double_wrapped_by=_wrapped_by(handles),
        deepep_loaded="deep_ep" in sys.modules if stated.deepep_loaded is None else stated.deepep_loaded,
        nvshmem_loaded="nvshmem" in sys.modules if stated.nvshmem_loaded is None else stated.nvshmem_loaded,
        host_available_bytes=available_host_bytes(),
        host_backup_bytes=None if saved_bytes is None else saved_bytes * (len(places) // max(1, len(nodes))),
        split_share_communicators=any(handle.options.split_share for handle in handles),
        offloads_trainer=saver.name != NO_SAVER
        if stated.offloads_trainer is None
        else stated.offloads_trainer,
    )


def _parallel_sizes(handles: list[ManagedGroup]) -> dict[str, int]:
    """Sizes of the layout as Megatron's groups show them; a group of one rank is no handle."""
    kinds = {
        "tp": "TENSOR_MODEL_PARALLEL_GROUP",
        "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
        "cp": "CONTEXT_PARALLEL_GROUP",
        "ep": "EXPERT_MODEL_PARALLEL_GROUP",
        "dp": "DATA_PARALLEL_GROUP",
    }
    sizes = {handle.description: handle.size() for handle in handles}
    return {name: sizes.get(kind, 1) for name, kind in kinds.items()}


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _preloaded(saver: Saver) -> bool | None:
    if saver.name != TORCH_MEMORY_SAVER:
        return None
    if not torch.cuda.is_available():
        return True  # the saver was given its library by hand: there is nothing to preload
    try:
        check_preload(cuda=torch.version.cuda)
    except SaverError:
        return False
    return True


def _wrapped_by(handles: list[ManagedGroup]) -> str:
    """The library, other than Pitstop, that has put itself between the trainer and its groups."""
    for function in (dist.new_group, dist.all_reduce):
        module = getattr(function, "__module__", "") or ""
        if not module.startswith(("torch.", "pitstop_runtime.")):
            return module
    loaded = [name for name in sys.modules if name.rsplit(".", 1)[-1] in _FOREIGN_WRAPPERS]
    world = dist.group.WORLD
    if loaded and world is not None and not isinstance(world, ManagedGroup) and not handles:
        return loaded[0]
    return NOBODY
