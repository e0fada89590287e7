"""Let newer Megatron-core releases be imported without Triton, which CPU builds of torch do not have."""

from __future__ import annotations

import importlib.util
import sys
import types

# Modules of Megatron-core that hold nothing but Triton kernels and that 0.19 imports unconditionally. None
# of the kernels runs on CPU.
_KERNEL_MODULES = ("megatron.core.transformer.moe.ops.paged_stash",)


def stand_in_for_triton_kernels() -> None:
    """Put empty modules in place of kernel modules unless Triton is there; call before Megatron's import."""
    if importlib.util.find_spec("triton") is not None:
        return
    for name in _KERNEL_MODULES:
        module = types.ModuleType(name)
        module.__getattr__ = _no_kernel  # type: ignore[method-assign]
        sys.modules[name] = module


def _no_kernel(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
