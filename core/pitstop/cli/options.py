"""Arguments and options that several commands have, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ScenarioArgument = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="Scenario file, YAML or JSON.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
