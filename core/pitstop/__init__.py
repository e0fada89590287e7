"""Pitstop's vocabulary: scenarios, communicators, plans, telemetry and predictions."""

__version__ = "0.1.0"
