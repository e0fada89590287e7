"""What commands print with: data on stdout, progress on stderr, one way to write seconds and bytes.

Rich is imported when the first console is made: ``--json`` and ``--help`` do without it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import BaseModel

from pitstop.units import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pitstop.prediction import Interval

PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe, unless COLUMNS says otherwise."""

_MAX_DECIMALS = 3


def console() -> Console:
    """A console for data: stdout."""
    return _console(sys.stdout)


def progress_console() -> Console:
    """A console for progress, hints and warnings: stderr."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    from rich.console import Console  # noqa: PLC0415 - see the module's docstring

    width = None
    if not file.isatty():
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) > 0 else PLAIN_WIDTH
    # Under NO_COLOR rich alone would still print bold and underlined text; here it means no escape codes.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        file=file,
        width=width,
        color_system=None if plain else "auto",
        no_color=plain,
        highlight=False,
        emoji=False,
        soft_wrap=False,
    )


def table(columns: Sequence[str], title: str | None = None, numbers: Sequence[str] = ()) -> Table:
    """A table in the house's style; the columns named in ``numbers`` are aligned to the right."""
    from rich import box  # noqa: PLC0415 - see the module's docstring
    from rich.table import Table  # noqa: PLC0415

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def emit_json(document: BaseModel | Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a model, or plain data that may contain models, as indented JSON on stdout.

    Raises:
        ValueError: the data contains NaN or infinity, which JSON does not have.
    """
    data = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False, default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def seconds(value: Interval | float) -> str:
    """Seconds for people: ``4.77 s [3.9, 5.6]``, with as many decimals as the interval's width deserves."""
    return _quantity(value, 1.0, "s")


def gib(value_bytes: Interval | float) -> str:
    """Bytes as GiB for people: ``3.62 GiB [3.4, 3.9]``."""
    return _quantity(value_bytes, GIB, "GiB")


def _quantity(value: Interval | float, unit: float, name: str) -> str:
    if isinstance(value, (int, float)):
        return f"{_number(value / unit, _decimals(value / unit))} {name}"
    mean, lo, hi = value.mean / unit, value.lo / unit, value.hi / unit
    if hi <= lo:
        return f"{_number(mean, _decimals(mean))} {name}"
    width = hi - lo
    decimals = 0 if hi >= 100 and width >= 5 else 1 if width >= 0.5 else 2 if width >= 0.05 else _MAX_DECIMALS
    finer = max(decimals, min(decimals + 1, 2))
    return f"{_number(mean, finer)} {name} [{_number(lo, decimals)}, {_number(hi, decimals)}]"


def _decimals(value: float) -> int:
    """Decimals that leave about three significant digits."""
    if value == 0 or not math.isfinite(value):
        return 0
    return min(max(2 - math.floor(math.log10(abs(value))), 0), _MAX_DECIMALS)


def _number(value: float, decimals: int) -> str:
    # Adding zero turns the -0.0 that rounding leaves behind into 0.0.
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"
