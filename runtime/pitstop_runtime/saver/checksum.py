"""Did parameters survive the pause? Checksums of a sample, before and after.

Savers have returned wrong memory without an error (torch_memory_saver 0.0.9 on H100), and a model that trains on
from damaged weights shows it only much later.

Cost, per ``take`` or ``verify``: at most ``tensors * bytes_each`` bytes read on the device (8 MiB by default, some
microseconds), a working copy of up to eight times ``bytes_each``, a few kernel launches per tensor, and one transfer
of 8 bytes per tensor to the host, which waits for the device.

What it cannot catch: damage outside the sample (another sample is drawn each time, so damage that lasts or comes
back is found in time); damage done before ``take``; two changes that cancel out in 64 bits; tensors that are not
contiguous, which are left out; and optimizer state, unless it is among the tensors given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pitstop_runtime.errors import CorruptedMemoryError, SaverError

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Callable[[], Iterable[tuple[str, "Tensor"]]]

_MASK = 2**64 - 1


class ParameterCheck:
    """``take`` before the pause, ``verify`` after the resume.

    Args:
        named: gives the tensors with their names, for instance ``model.named_parameters``.
        tensors: how many are sampled.
        bytes_each: how many bytes of each are read, from a place that is drawn as well.
        seed: of the drawing; equal seeds and calls give equal samples.
    """

    def __init__(
        self, named: NamedTensors, *, tensors: int = 8, bytes_each: int = 1024**2, seed: int = 0
    ) -> None:
        self._named = named
        self._tensors = tensors
        self._bytes_each = bytes_each
        self._random = random.Random(seed)
        self._taken: list[tuple[str, Any, int]] | None = None

    def take(self) -> None:
        """Draw a sample and keep its checksums."""
        parts = self._sample()
        sums = _checksums([part for _, part in parts])
        self._taken = [(name, part, value) for (name, part), value in zip(parts, sums, strict=True)]

    def verify(self) -> int:
        """Compare with what ``take`` kept; returns how many tensors were compared.

        Raises:
            CorruptedMemoryError: a parameter differs; the message names it and both checksums.
            SaverError: there is nothing to compare with.
        """
        if self._taken is None:
            raise SaverError("verify was called without take: take the checksums before the pause.")
        taken, self._taken = self._taken, None
        now = _checksums([part for _, part, _ in taken])
        wrong = [
            (name, before, after)
            for (name, _, before), after in zip(taken, now, strict=True)
            if before != after
        ]
        if wrong:
            name, before, after = wrong[0]
            raise CorruptedMemoryError(
                f"parameter {name} changed while memory was paused: checksum {before & _MASK:016x} before, "
                f"{after & _MASK:016x} after; {len(wrong)} of {len(taken)} sampled parameters differ. Do not train "
                "on: load the last checkpoint, and report the saver's version with this message."
            )
        return len(taken)

    def _sample(self) -> list[tuple[str, Any]]:
        candidates = [
            (name, tensor) for name, tensor in self._named() if tensor.numel() and tensor.is_contiguous()
        ]
        if not candidates:
            raise SaverError("there is no contiguous parameter to check: pass those of the whole model.")
        chosen = self._random.sample(candidates, min(self._tensors, len(candidates)))
        return [(name, self._part(tensor)) for name, tensor in chosen]

    def _part(self, tensor: Tensor) -> Any:
        flat: Any = tensor.detach().reshape(-1)
        length = min(flat.numel(), max(1, self._bytes_each // flat.element_size()))
        start = self._random.randint(0, flat.numel() - length)
        return flat[start : start + length]


def _checksums(parts: list[Any]) -> list[int]:
    """One number per part, all fetched from the device at once."""
    import torch  # noqa: PLC0415 - the module is read without torch as well

    with torch.no_grad():
        return [int(value) for value in torch.stack([_checksum(part) for part in parts]).tolist()]


def _checksum(part: Any) -> Any:
    """The bits as integers, each times an odd number of its position, summed modulo 2**64.

    An odd factor loses no bit of a changed element; different factors notice elements that trade places.
    """
    import torch  # noqa: PLC0415 - the module is read without torch as well

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = part.element_size()
    if width not in integers:  # complex128
        part, width = torch.view_as_real(part).reshape(-1), width // 2
    bits = part.view(integers[width]).to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=part.device)).sum()
