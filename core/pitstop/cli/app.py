"""The application: sub-commands of all packages under one name, errors turned into messages and exit codes.

The command lives in core, but core may import none of the layers above it. So they plug in: each entry point
of the group ``pitstop.commands`` is a function ``register(app: typer.Typer) -> None`` that adds its
sub-commands. Every start of ``pitstop`` imports all of these modules; they import what is heavy (numpy, rich, a
web framework) inside their commands only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Protocol, runtime_checkable

import typer

from pitstop import __version__
from pitstop.cli import gates, inventory, nccl_config, plans
from pitstop.errors import InvalidInputError, MissingExtraError, PitstopError, UnsupportedScenarioError

COMMANDS_GROUP = "pitstop.commands"

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_INVALID_INPUT = 2
EXIT_UNSUPPORTED = 3
EXIT_MISSING_EXTRA = 4
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT

_EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 failed; 2 invalid input or usage; 3 the evidence does not reach this scenario; "
    "4 an optional part is not installed; 70 a bug in Pitstop; 130 interrupted."
)

# The first class that matches decides.
_EXIT_CODES: tuple[tuple[type[PitstopError], int], ...] = (
    (InvalidInputError, EXIT_INVALID_INPUT),
    (UnsupportedScenarioError, EXIT_UNSUPPORTED),
    (MissingExtraError, EXIT_MISSING_EXTRA),
    (PitstopError, EXIT_ERROR),
)


@runtime_checkable
class _UsageProblem(Protocol):
    """What typer raises on wrong usage. The class has moved between typer's releases; its form has not."""

    exit_code: int

    def show(self) -> None:
        """Print the message and a hint to stderr."""


def build_app() -> typer.Typer:
    """The application with core's own commands and those of every plug-in that can be imported."""
    app = typer.Typer(
        name="pitstop",
        help="Predict, plan and carry out the trainer/rollout switch of colocated RL training.",
        epilog=_EXIT_CODES_HELP,
        no_args_is_help=True,
        add_completion=False,
        # Rich costs a third of the start-up time; help texts and usage errors do without it.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    plans.register(app)
    inventory.register(app)
    gates.register(app)
    nccl_config.register(app)
    for point in sorted(entry_points(group=COMMANDS_GROUP), key=lambda point: point.name):
        try:
            register = point.load()
        except ImportError as error:
            # One package that cannot be imported must not take the other commands away, nor go unnoticed.
            print(f"pitstop: the commands of {point.value} are not available: {error}", file=sys.stderr)
            continue
        register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process; ``arguments`` default to those of the process."""
    sys.exit(run(build_app, sys.argv[1:] if arguments is None else arguments))


def run(source: Callable[[], typer.Typer], arguments: Sequence[str]) -> int:
    """Run an application and return its exit code, with each error as a message on stderr."""
    try:
        # Not standalone: typer would end the process itself, and with other codes.
        result = source()(args=list(arguments), prog_name="pitstop", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = _explain(error)
    except SystemExit as error:  # rich and typer end the process themselves if a pipe is closed
        code = error.code if isinstance(error.code, int) else EXIT_ERROR
    else:
        code = result if isinstance(result, int) else EXIT_OK
    return code


def _explain(error: BaseException) -> int:
    """Say on stderr what went wrong, and return the exit code."""
    match error:
        case KeyboardInterrupt() | typer.Abort():  # older releases of typer make the one of the other
            code = EXIT_INTERRUPTED
        case BrokenPipeError():
            _mute_stdout()
            code = EXIT_ERROR
        case PitstopError():
            print(f"{error.title}: {error}", file=sys.stderr)
            code = next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
        case _UsageProblem():
            error.show()
            code = error.exit_code
        case _:
            _report_bug(error)
            code = EXIT_BUG
    return code


def _mute_stdout() -> None:
    """Let nothing more be written to a closed pipe: the interpreter's own flush at exit would complain."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _report_bug(error: BaseException) -> None:
    import traceback  # noqa: PLC0415 - costs start-up time and is hardly ever needed

    traceback.print_exception(error)
    print(
        f"pitstop {__version__}: this is a bug in Pitstop; please report it with the text above.",
        file=sys.stderr,
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pitstop {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Predict, plan and carry out the trainer/rollout switch of colocated RL training."""
    del version  # dealt with by its callback
