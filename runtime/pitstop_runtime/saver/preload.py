"""Is torch_memory_saver really between torch and the driver in this process?

The library replaces ``cudaMalloc`` by being loaded first. Where it is not, or not fully set up, nothing fails: a
pause frees nothing, or the weights come back as garbage. So each condition is checked before the first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pitstop_runtime.errors import SaverError

_START = (
    "Start the trainer's processes with\n"
    '  LD_PRELOAD=$(python3 -c "from torch_memory_saver.utils import get_binary_path_from_package as path; '
    "print(path('torch_memory_saver_hook_mode_preload'))\") \\\n"
    "  TMS_INIT_ENABLE=1 TMS_INIT_ENABLE_CPU_BACKUP=1 python3 ...\n"
    "(with Ray: in the actor's runtime_env, env_vars)."
)
_TRUE = {"1", "true", "yes"}
_FALSE = {"", "0", "false", "no"}
_MAPS = Path("/proc/self/maps")


def manages_everything(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all of torch's device memory is the saver's, rather than only what a region allocates."""
    return _is_on(environ, "TMS_INIT_ENABLE")


def check_preload(
    environ: Mapping[str, str] = os.environ, loaded: str | None = None, cuda: str | None = None
) -> Path:
    """Make sure that the library's hook is loaded and will keep what has to be kept; returns its file.

    Args:
        environ: the environment that the process was started with.
        loaded: the process's memory map, as in /proc/self/maps.
        cuda: the CUDA version that torch was built for; None for a build without CUDA.

    Raises:
        SaverError: one of the conditions does not hold; the message says how to start the process.
    """
    given = environ.get("LD_PRELOAD", "")
    hooks = [entry for entry in re.split(r"[:\s]+", given) if "torch_memory_saver" in entry]
    if len(hooks) != 1:
        found = f"names {len(hooks)} of its libraries" if hooks else "does not name its library"
        raise SaverError(f"torch_memory_saver is not loaded: LD_PRELOAD={given!r} {found}. {_START}")
    hook = Path(hooks[0])
    if hook.name not in (_MAPS.read_text() if loaded is None else loaded):
        raise SaverError(
            f"torch_memory_saver is not loaded: LD_PRELOAD names {hook}, but this process does not have it. The "
            f"variable was set after the process had started, or the file is missing. {_START}"
        )
    _check_cuda(hook, cuda)
    _check_contents_kept(environ)
    _check_segments(environ)
    return hook


def _check_cuda(hook: Path, cuda: str | None) -> None:
    built = re.search(r"_cu(\d+)\.", hook.name)
    if cuda and built and cuda.partition(".")[0] != built[1]:
        raise SaverError(
            f"LD_PRELOAD names {hook.name}, built for CUDA {built[1]}, but torch was built for CUDA {cuda}. {_START}"
        )


def _check_contents_kept(environ: Mapping[str, str]) -> None:
    kept = ("TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP")
    if manages_everything(environ) and not any(_is_on(environ, name) for name in kept):
        raise SaverError(
            "TMS_INIT_ENABLE=1 puts all of torch's memory in the saver, but without TMS_INIT_ENABLE_CPU_BACKUP=1 "
            f"weights and optimizer state would come back as garbage. {_START}"
        )


def _check_segments(environ: Mapping[str, str]) -> None:
    # The library looks at the first name only; torch reads both. Such segments never pass through cudaMalloc.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*True", value, re.IGNORECASE):
            raise SaverError(
                f"{name}={value!r}: torch's expandable segments bypass torch_memory_saver, so that a pause would "
                "free nothing. Remove expandable_segments."
            )


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value.lower() not in _TRUE | _FALSE:
        # The library ends the process on any other value.
        raise SaverError(f"{name}={value!r} is not understood by torch_memory_saver: use 1 or 0.")
    return value.lower() in _TRUE
