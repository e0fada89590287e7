"""Run functions of a module, each in a fork of a process that has done the imports.

The driver lives in one process, and a mistake with paused memory ends it. So each test has a process of its own,
without paying for the imports each time:

    python -m fake_cuda.forked MODULE

reads lines ``FUNCTION IMPORT...`` from standard input: the modules to import before the fork, if they are not yet.
It answers each with one JSON line: ``null``, or what went wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable


def exit_status(function: Callable[[], object], quiet: bool = True) -> int:
    """Call a function in a fork; the fork's exit status, negative for a signal, 0 if the function returned."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 99
    try:
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(function: Callable[[], object]) -> str | None:
    with tempfile.NamedTemporaryFile("w+") as log:

        def logged() -> None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            function()

        status = exit_status(logged, quiet=False)
        log.seek(0)
        return None if status == 0 else f"exit status {status}\n{log.read()[-6000:]}"


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        function, *imports = line.split()
        for name in imports:
            importlib.import_module(name)
        print(json.dumps(_run(getattr(module, function))), flush=True)


if __name__ == "__main__":
    main()
