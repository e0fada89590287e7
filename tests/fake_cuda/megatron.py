"""Let Megatron-core allocate what it trains with in a saver's regions, where a GPU's allocator would do so by itself.

Weights and optimizer state (master copies, moments) are backed up; gradient buffers are not, or are left to torch, so
that ``Recomputed`` can empty them. Activations and what a step allocates stay ordinary memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.overrides import TorchFunctionMode

from pitstop_runtime.saver import Saver


def adopt_megatron_buffers(saver: Saver, *, gradients: bool = True) -> None:
    """From now on, in this process, Megatron's models and optimizers are built in the saver's memory.

    Call it before ``DistributedDataParallel`` and the optimizer are made; the saver must know the tags ``weights``,
    ``gradients`` and ``optimizer``.

    Args:
        saver: where to allocate.
        gradients: False leaves gradient buffers to torch's own allocator.
    """

    def weights(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return saver.region("weights", backup=True)

    def state(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return saver.region("optimizer", backup=True)

    def buffers(*args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return _BuffersInRegions(saver, gradients, *args, **kwargs)

    def moved_weights(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        module = kwargs["module"] if "module" in kwargs else args[3]
        with weights():
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
        return nullcontext()

    _inside(DistributedDataParallel, "__init__", moved_weights)
    _inside(param_and_grad_buffer._ParamAndGradBuffer, "__init__", buffers)
    for builder in (DistributedOptimizer, Float16OptimizerWithFloat16Params):
        _inside(builder, "__init__", state)
    _inside(megatron_optimizer.Adam, "_init_group", state)  # where torch's optimizer makes its moments


class _BuffersInRegions(TorchFunctionMode):
    """While a buffer is made: its zeroed parts go to their tags, the parameters' part before the gradients'.

    Only the distributed optimizer keeps parameters in the buffer, and then they are made first.
    """

    def __init__(self, saver: Saver, gradients: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        options = kwargs["ddp_config"] if "ddp_config" in kwargs else args[1]
        self._saver = saver
        self._gradients = gradients
        self._parts = iter(["weights", "gradients"] if options.use_distributed_optimizer else ["gradients"])

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.zeros:
            tag = next(self._parts)
            if tag == "weights" or self._gradients:
                with self._saver.region(tag, backup=tag == "weights"):
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _inside(owner: type, name: str, context: Callable[..., AbstractContextManager[Any]]) -> None:
    """Run a method inside a context that is made from the method's arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self, *args, **kwargs):
            return original(self, *args, **kwargs)

    setattr(owner, name, replaced)
