"""The ``pitstop`` command. See ``pitstop.cli.app`` for how other packages plug their sub-commands in."""

from pitstop.cli.app import main

__all__ = ["main"]
