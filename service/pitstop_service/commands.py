"""The service's sub-commands of `pitstop`: serve and db. FastAPI and SQLAlchemy are loaded only when one runs."""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from pitstop.errors import FieldProblem, InvalidInputError, MissingExtraError, PitstopError, show_value

_DatabaseUrl = Annotated[
    str,
    typer.Option(
        envvar="PITSTOP_DATABASE_URL",
        help="sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME.",
        show_envvar=True,
    ),
]
# The same as settings.DEFAULT_DATABASE_URL, which cannot be imported without pydantic-settings.
_DEFAULT_URL = "sqlite:///pitstop.sqlite3"


def register(app: typer.Typer) -> None:
    """Add the commands to the `pitstop` application."""
    app.command("serve")(serve_command)
    db = typer.Typer(help="Migrate the service's database.", no_args_is_help=True)
    db.command("upgrade")(upgrade_command)
    db.command("downgrade")(downgrade_command)
    db.command("current")(current_command)
    app.add_typer(db, name="db")


def serve_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: any free one.")] = 8787,
    database_url: _DatabaseUrl = _DEFAULT_URL,
    migrate: Annotated[bool, typer.Option("--migrate", help="Upgrade the database schema first.")] = False,
    insecure_allow_remote: Annotated[
        bool,
        typer.Option(
            "--insecure-allow-remote", help="Listen on other than loopback addresses, for anyone to use."
        ),
    ] = False,
) -> None:
    """Serve predictions and runs over HTTP (see /docs once it runs)."""
    if not _is_loopback(host) and not insecure_allow_remote:
        _refuse(
            "--host",
            show_value(host),
            "this version has no authentication, and this is not a loopback address",
            "Listen on 127.0.0.1, or give --insecure-allow-remote where only trusted machines can reach the port.",
        )
    with _service():
        import uvicorn  # noqa: PLC0415 - see the module's docstring

        from .app import create_app  # noqa: PLC0415
        from .database.engine import build_engine, parse_url  # noqa: PLC0415
        from .database.migrations import schema_state, upgrade  # noqa: PLC0415
        from .settings import Settings  # noqa: PLC0415

        if migrate:
            state = upgrade(database_url)
        else:
            engine = build_engine(database_url)
            state = schema_state(engine)
            engine.dispose()
        if not state.at_head:
            _refuse(
                "--database-url",
                show_value(parse_url(database_url).render_as_string(hide_password=True)),
                f"the database schema is at {state.current or 'nothing'}, needed is {state.head}",
                "Run `pitstop db upgrade` on it, or start with `pitstop serve --migrate`.",
            )
        app = create_app(Settings(database_url=database_url))
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_config=_log_config(uvicorn.config.LOGGING_CONFIG),
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=10,
    )


def upgrade_command(
    revision: Annotated[str, typer.Argument(help="Revision to reach.")] = "head",
    database_url: _DatabaseUrl = _DEFAULT_URL,
) -> None:
    """Upgrade the database schema."""
    with _service():
        from .database.migrations import upgrade  # noqa: PLC0415

        _show(upgrade(database_url, revision))


def downgrade_command(
    revision: Annotated[str, typer.Argument(help="Revision to go back to, -1 for one step, or base.")],
    database_url: _DatabaseUrl = _DEFAULT_URL,
) -> None:
    """Downgrade the database schema; this deletes what the newer revisions hold."""
    with _service():
        from .database.migrations import downgrade  # noqa: PLC0415

        _show(downgrade(database_url, revision))


def current_command(database_url: _DatabaseUrl = _DEFAULT_URL) -> None:
    """Show the revision of the database schema and the one that is needed."""
    with _service():
        from .database.engine import build_engine  # noqa: PLC0415
        from .database.migrations import schema_state  # noqa: PLC0415

        engine = build_engine(database_url)
        _show(schema_state(engine))
        engine.dispose()


def _show(state: Any) -> None:
    typer.echo(f"{state.current or 'nothing'} (needed: {state.head})")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _refuse(field: str, value: str, problem: str, remedy: str) -> NoReturn:
    raise InvalidInputError("refusing to serve", [FieldProblem(field, value, problem, remedy)])


@contextmanager
def _service() -> Iterator[None]:
    """Turn what can go wrong with the installation and the database into messages."""
    try:
        import alembic  # noqa: F401, PLC0415
        import fastapi  # noqa: F401, PLC0415
        import fastapi_problem  # noqa: F401, PLC0415
        import pydantic_settings  # noqa: F401, PLC0415
        import uvicorn  # noqa: F401, PLC0415
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'pitstop[service]'") from None
    try:
        yield
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise PitstopError(
            f"the database cannot be used: {cause}. Check --database-url and that the database runs."
        ) from None


def _log_config(default: dict[str, Any]) -> dict[str, Any]:
    """Uvicorn's logging, all of it on stderr: stdout is for data."""
    config = copy.deepcopy(default)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["pitstop_service"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config
