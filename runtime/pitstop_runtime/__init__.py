"""In the trainer's process: groups, gates, canary, lifecycle and telemetry. Knows only the core."""
