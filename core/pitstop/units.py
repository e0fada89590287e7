"""Units used throughout: bytes and seconds inside, GiB and MiB only at the edges."""

MIB = 1024**2
GIB = 1024**3
GB = 10**9


def mib(value_bytes: float) -> float:
    """Bytes as MiB."""
    return value_bytes / MIB


def gib(value_bytes: float) -> float:
    """Bytes as GiB."""
    return value_bytes / GIB
