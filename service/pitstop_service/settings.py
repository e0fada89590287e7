"""Settings of the service, from arguments or from ``PITSTOP_*`` environment variables."""

from __future__ import annotations

import os

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_DATABASE_URL = "sqlite:///pitstop.sqlite3"


class Settings(BaseSettings):
    """What a running service needs to know; sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="PITSTOP_", frozen=True)

    database_url: str = Field(
        default=DEFAULT_DATABASE_URL, repr=False, description="SQLAlchemy URL; may hold a password"
    )
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1024, description="largest request body")
    prediction_workers: int = Field(
        default_factory=lambda: min(os.cpu_count() or 1, 16),
        ge=1,
        le=16,
        description="predictions computed at once",
    )
    prediction_queue: int = Field(
        default=16, ge=0, le=20, description="predictions that may wait; more get 503"
    )
