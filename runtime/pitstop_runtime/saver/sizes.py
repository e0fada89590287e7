"""Bytes as people read them."""

from __future__ import annotations

from pitstop.units import GIB, MIB, gib, mib


def show_bytes(value_bytes: int) -> str:
    """A size for a message: GiB from a tenth of one on, MiB from a tenth of one on, bytes below."""
    if abs(value_bytes) >= GIB // 10:
        return f"{gib(value_bytes):.2f} GiB"
    if abs(value_bytes) >= MIB // 10:
        return f"{mib(value_bytes):.2f} MiB"
    return f"{value_bytes} bytes"
