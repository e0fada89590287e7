"""Tensors whose content need not survive a switch: gradient buffers, workspaces.

They are not worth a copy to the host and back. Their storages are emptied before the pause and given back, zeroed,
after the resume. Shape, views and every reference stay valid, because all of them refer to the storage; the address
may change. So do not register memory that others know by address: CUDA graphs, NCCL user buffers.

On a device, call ``release`` before ``torch.cuda.empty_cache()`` and the pause: what is released goes to torch's
caching allocator first. Work that still uses the tensors must be finished.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pitstop_runtime.errors import SaverError
from pitstop_runtime.saver.sizes import show_bytes

if TYPE_CHECKING:
    from torch import Tensor


class Recomputed:
    """The registered tensors of one trainer. Both directions may be called twice; the second does nothing."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, tensor: Tensor) -> None:
        """Register the tensor's storage, views of it included; adding a second view of it changes nothing.

        Raises:
            SaverError: a parameter (its content has to survive), or a storage that cannot be resized, such as
                memory of another library.
        """
        import torch  # noqa: PLC0415 - the module is read without torch as well

        if isinstance(tensor, torch.nn.Parameter):
            raise SaverError(
                f"a parameter of shape {tuple(tensor.shape)} was registered as recomputed, but its content has to "
                "survive the pause. Register its gradient buffer (main_grad), not the parameter."
            )
        storage: Any = tensor.untyped_storage()
        if not storage.resizable():
            raise SaverError(
                f"the storage behind a tensor of shape {tuple(tensor.shape)} on {tensor.device} "
                f"({show_bytes(storage.nbytes())}) cannot be resized: its memory belongs to something else than "
                "torch's allocator. Allocate it with torch, or inside Saver.region(tag, backup=False)."
            )
        with self._lock:
            if self._sizes:
                raise SaverError("tensors cannot be registered while the others are released: restore first.")
            # The storage itself is the key: its address is zero once it is empty.
            self._storages[storage._cdata] = storage

    @property
    def released(self) -> bool:
        """Whether any storage is empty now."""
        return bool(self._sizes)

    def held_bytes(self) -> int:
        """What the registered storages hold now."""
        return sum(int(storage.nbytes()) for storage in self._storages.values())

    def release(self) -> int:
        """Empty all storages; returns the bytes given back by this call."""
        freed = 0
        with self._lock:
            for key, storage in self._storages.items():
                size = int(storage.nbytes())
                if size:
                    self._sizes[key] = size
                    storage.resize_(0)
                    freed += size
        return freed

    def restore(self) -> int:
        """Give all storages their size back, zeroed; returns the bytes taken by this call.

        Raises:
            SaverError: there is no memory for one. Those before it are restored; call again once there is.
        """
        taken = 0
        with self._lock:
            for key, size in list(self._sizes.items()):
                storage = self._storages[key]
                try:
                    storage.resize_(size)
                    storage.fill_(0)
                except RuntimeError as error:
                    waiting = sum(self._sizes.values())
                    raise SaverError(
                        f"no memory to restore a buffer of {show_bytes(size)} ({show_bytes(waiting)} to go): "
                        f"{error}. Free device memory and call restore again."
                    ) from error
                del self._sizes[key]
                taken += size
        return taken
