"""A buffer that the processes of a node map into each other: CUDA IPC, or a file where there is no GPU."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pitstop_runtime.groups.communicator import Library


class SharedBuffer:
    """A buffer and what each of the other processes needs to map it.

    Torch counts who has mapped a CUDA buffer and expects one process per offer: with fewer offers than processes
    its count never comes to zero, and the memory is never freed.
    """

    def __init__(self, buffer: Tensor, offers: list[tuple[Any, ...]]) -> None:
        self.buffer, self.offers = buffer, offers

    @classmethod
    def make(cls, library: Library, size: int, ranks: int, rank: int) -> SharedBuffer:
        """Take memory and offer it to all other ranks.

        Raises:
            RuntimeError: there is not enough of it, or it cannot be shared.
        """
        if library is Library.NCCL:
            from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415 - needs no import on CPU

            buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
            return cls(buffer, [() if r == rank else reduce_tensor(buffer) for r in range(ranks)])
        path = Path(tempfile.gettempdir()) / f"pitstop-{uuid.uuid4().hex}"
        buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return cls(buffer, [(str(path), size)] * ranks)

    def publish_no_more(self) -> None:
        """All have mapped it: of a file, the name can go."""
        if not self.buffer.is_cuda:
            Path(self.offers[0][0]).unlink(missing_ok=True)

    @staticmethod
    def map(offer: tuple[Any, ...], device: str | None) -> Tensor:
        """What another rank offered to this one; ``device`` names the GPU that it is on.

        Raises:
            RuntimeError: it cannot be mapped.
        """
        if device is None:
            path, size = offer
            return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        rebuild, arguments = offer
        own = list(arguments)
        # As memory of this process's own GPU, which reads the other one's through it: to be on that GPU, a process
        # makes a context there, and that holds half a gibibyte for the rest of its life. So would the event.
        own[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        own[_EVENT_ARGUMENT] = False  # ranks wait for each other's streams themselves
        mapped: Tensor = rebuild(*own)
        return mapped


# Positions among the arguments of torch's ``rebuild_cuda_tensor`` (2.11 to 2.14).
_DEVICE_ARGUMENT = 6
_EVENT_ARGUMENT = 14


def device_uuid() -> str | None:
    """What names this process's GPU in every process; None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def local_index(device: str) -> int | None:
    """Number of a GPU in this process, if it sees it."""
    found = (str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    return next((index for index, name in enumerate(found) if name == device), None)


def has_access(device: str) -> bool:
    """Whether this process's GPU can read that one's memory."""
    other, mine = local_index(device), torch.cuda.current_device()
    return other == mine or (other is not None and torch.cuda.can_device_access_peer(mine, other))
