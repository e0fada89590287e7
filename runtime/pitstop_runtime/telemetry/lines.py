"""Lines of the spool: one JSON document each, with a checksum of the record's exact bytes.

The head has a fixed length, so the record is cut out and sent as it was written, without parsing it again.
"""

from __future__ import annotations

import zlib

_HEAD = b'{"crc32":"'
_MIDDLE = b'","record":'
_SUM = slice(len(_HEAD), len(_HEAD) + 8)
_START = _SUM.stop + len(_MIDDLE)


def encode(record: bytes) -> bytes:
    """A record's JSON as one line of a segment, newline included."""
    return b"%b%08x%b%b}\n" % (_HEAD, zlib.crc32(record), _MIDDLE, record)


def decode(line: bytes) -> bytes | None:
    """The record of a line without its newline; None if it is torn or corrupted."""
    record = line[_START:-1]
    if not line.startswith(_HEAD) or line[_SUM.stop : _START] != _MIDDLE or not line.endswith(b"}"):
        return None
    return record if line[_SUM] == b"%08x" % zlib.crc32(record) else None


def split(content: bytes) -> list[bytes]:
    """The lines of a segment, an unfinished last one included."""
    return [line for line in content.split(b"\n") if line]


def count(content: bytes) -> int:
    """How many lines ``split`` finds."""
    return len(split(content))
