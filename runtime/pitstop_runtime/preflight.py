"""Before the first switch: can weights leave this process at all?"""

from __future__ import annotations

import torch

from pitstop_runtime.errors import SwitchError, first_line
from pitstop_runtime.saver import Saver


def check_ipc(saver: Saver) -> None:
    """Export a small tensor by CUDA IPC as ``update_weights`` will, and let it go again.

    Memory of a saver cannot be exported (THUDM/slime#2188), nor can expandable segments by the old way. Better
    to know before the first training step than at its end.

    Raises:
        SwitchError: the export failed; the message says what to look at.
    """
    if not torch.cuda.is_available():
        return
    with saver.disabled():
        tensor = torch.zeros(1024, device="cuda")
    try:
        tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise SwitchError(
            f"weights cannot be handed over by CUDA IPC: {first_line(error)}. Allocate what is exported "
            "inside saver.disabled(), unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, and see that all "
            "processes see each other's devices (CUDA_VISIBLE_DEVICES)."
        ) from error
