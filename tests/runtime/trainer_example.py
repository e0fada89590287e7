"""Where the example is, and how its first lines say that it is started."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trainer_loop.py"


def command() -> list[str]:
    """The command line that the example prints, with torchrun as this interpreter's module."""
    printed = re.search(r"^ +(torchrun .*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert printed is not None
    program, *arguments = shlex.split(printed[1])
    assert program == "torchrun"
    return [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *arguments]
