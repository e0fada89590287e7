"""What the parts that send have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from .retry import Backoff, Patience
from .spool import DEFAULT_SEGMENT_RECORDS
from .stats import Counters, QuietLog


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How to send."""

    batch_size: int = DEFAULT_SEGMENT_RECORDS
    backoff: Backoff = field(default_factory=Backoff)
    every_s: float = 1.0
    """at most one batch in this time, unless a full one waits: a request takes the interpreter from the trainer"""
    refused_pause_s: float = 300.0
    """wait after the service refused to deal with us at all (token, address): somebody has to mend that"""


@dataclass(frozen=True, slots=True)
class Shared:
    """What a client's threads and its leftovers share."""

    patience: Patience
    counters: Counters
    log: QuietLog
    options: SendOptions
