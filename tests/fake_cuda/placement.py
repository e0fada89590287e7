"""Put the new CPU tensors of a thread into memory that a saver manages.

Below autograd, every operation's result is looked at: one with a storage of its own is copied into managed memory
and takes that as its storage. So factories, copies and conversions all land there, whatever they are called, and
autograd, parameters and optimizers see ordinary tensors. Slow; meant for building models and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Placement(TorchDispatchMode):
    """While entered, new tensors come from ``allocate``, if ``wanted`` says so.

    Scalars, such as an optimizer's step count, stay where they are: on the host, with a GPU too.

    Args:
        allocate: gives a writable buffer of so many bytes, which lives as long as something refers to it.
        wanted: whether to place now.
    """

    def __init__(self, allocate: Callable[[int], Any], wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._allocate = allocate
        self._wanted = wanted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap the method below for the compiler, and import that: seconds in every process.
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._wanted():
            return result
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}

        def place(value: Any) -> Any:
            return self._placed(value) if _is_plain(value) and _storage(value) not in given else value

        return tree_map(place, result)

    def _placed(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not tensor.dim() or not storage.nbytes():
            return tensor
        managed = torch.frombuffer(self._allocate(storage.nbytes()), dtype=torch.uint8)
        managed.untyped_storage().copy_(storage)
        return torch.empty(0, dtype=tensor.dtype).set_(
            managed.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
