"""What does Megatron-core make of a file at ``nccl_communicator_config_path``? Jobs in, answers out, as JSON lines.

Input: the arguments of ``initialize_model_parallel`` with ``world_size``, and the file's ``text``. Megatron reads the
file and makes its options as it is; only the groups are made up (``record_groups``), and so is torch's class of NCCL
options where torch was built without NCCL.
Output: ``{"version": ..., "asked": {name: configuration or null}, "groups": {description: name}}``: for each name
that Megatron looks for, what of the file reached NCCL.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from megatron_cpu.record_groups import Recorder, __version__, dist, parallel_state

_get_nccl_options = parallel_state.get_nccl_options


class _Options:
    """Stands for ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


def read(job: dict[str, Any]) -> dict[str, Any]:
    """Initialise with the file, and see which of its entries are looked up."""
    asked: dict[str, Any] = {}
    recorder = Recorder()

    def get_nccl_options(name: str, configurations: dict[str, Any]) -> str:
        options = _get_nccl_options(name, configurations)
        asked[name] = None if options is None else vars(options.config)
        return name

    parallel_state.get_nccl_options = get_nccl_options
    dist.ProcessGroupNCCL = SimpleNamespace(Options=_Options)
    arguments = dict(job)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(arguments.pop("text"))
        file.flush()
        groups = recorder.record(arguments | {"nccl_communicator_config_path": file.name})
    names = {description: name for description, _, name, _ in groups if name is not None}
    return {"version": __version__, "asked": asked, "groups": names}


def main() -> None:
    """Answer each line of the standard input with one line."""
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))))


if __name__ == "__main__":
    main()
