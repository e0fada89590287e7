"""Answer "which device?" with "cpu", so that Megatron-core, written for CUDA, trains without a GPU.

No computation is replaced. What is answered differently:

- the current CUDA device is the CPU, and a request for a CUDA tensor gives a CPU tensor;
- a tensor's type name carries ``cuda`` (the optimizer looks at it to tell parameter types apart);
- the random-number tracker keeps states of the CPU's generator;
- streams are null objects, for a CPU has one order of execution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Install the answers for the rest of the process; calling it again does nothing."""
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("this adaptation is for machines without a GPU; run Megatron as it is")
    _answer_device_questions()
    _answer_stream_questions()
    _track_cpu_random_states()
    _allow_cpu_tensors_in_moe()
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device of tensor factories and moves; everything else passes through."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _NullStream:
    """A stream or event on which everything has already happened."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: self


def _answer_device_questions() -> None:
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.empty_cache = lambda: None


def _answer_stream_questions() -> None:
    null = _NullStream()
    torch.cuda.Stream = lambda *_args, **_kwargs: null
    torch.cuda.Event = lambda *_args, **_kwargs: null
    torch.cuda.current_stream = lambda *_args: null
    torch.cuda.default_stream = lambda *_args: null
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()


def _track_cpu_random_states() -> None:
    from megatron.core.tensor_parallel import random

    class CpuStates(random.CudaRNGStatesTracker):
        """The tracker over the CPU's generator."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name} or seed {seed} is already there")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    random._CUDA_RNG_STATE_TRACKER = CpuStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


def _allow_cpu_tensors_in_moe() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
        # Upstream converts to numpy only what comes from a GPU.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = (
            None  # upstream reads the name without defining it where TransformerEngine is absent
        )
