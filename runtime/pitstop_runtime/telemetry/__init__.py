"""The telemetry client: from the trainer's step to the service, over a spool that survives both.

`submit` -> queue -> (writer thread) -> spool on disk -> (sender thread) -> `POST /v1/runs/{id}/steps`.
"""

from .client import TelemetryClient
from .retry import Backoff
from .sending import SendOptions
from .stats import DropReason, TelemetryStats

__all__ = ["Backoff", "DropReason", "SendOptions", "TelemetryClient", "TelemetryStats"]
