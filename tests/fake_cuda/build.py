"""Build the stand-in libraries with gcc, once per state of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SOURCES = ("driver.c", "runtime.c", "runtime.map")
_FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")


class NoCompilerError(RuntimeError):
    """There is no gcc on this machine."""


def build() -> Path:
    """Return the folder with libcuda.so.1 and libcudart.so.12, building them if the sources have changed."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    folder = _HERE / "build" / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    if not shutil.which("gcc"):
        raise NoCompilerError("gcc is not installed, and the stand-in CUDA driver is built with it")
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        _compile(made / "libcuda.so.1", "driver.c")
        _compile(
            made / "libcudart.so.12",
            "runtime.c",
            f"-Wl,--version-script={_HERE / 'runtime.map'}",
            f"-L{made}",
            "-l:libcuda.so.1",
        )
        try:
            made.rename(folder)  # in one step, for two test processes may build at the same time
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _compile(target: Path, source: str, *more: str) -> None:
    command = ["gcc", *_FLAGS, f"-Wl,-soname,{target.name}", "-o", str(target), str(_HERE / source), *more]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ, LC_ALL="C")
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
