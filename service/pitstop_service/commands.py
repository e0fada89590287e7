"""The service's sub-commands of `pitstop`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the `pitstop` application."""
