"""What a group was made with: everything that a rebuilt communicator has to be made with again."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Attributes of ProcessGroupNCCL.Options that belong to one communicator and are set anew for each.
_PER_COMMUNICATOR = frozenset(
    {"config", "split_from", "split_color", "global_ranks_in_group", "group_name", "backend", "_timeout"}
)


@dataclass(slots=True)
class GroupOptions:
    """Options of one group, as given at its creation.

    ``pg_options`` is never changed: each communicator gets a copy. ``timeout`` follows later calls of
    ``set_timeout``. ``device`` is the bound device, if torch was given one.
    """

    timeout: timedelta
    pg_options: Any = None
    device: torch.device | None = None
    _key: tuple[object, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._key = _comparable(self.pg_options)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for options with which one communicator can serve both groups."""
        return (self.timeout, *self._key)

    @property
    def split_share(self) -> bool:
        """Whether the communicator is to share resources with the one it was split from."""
        return bool(getattr(getattr(self.pg_options, "config", None), "split_share", 0) == 1)

    def nccl(self, ranks: tuple[int, ...], name: str, max_ctas: int | None) -> Any:
        """Options for one new NCCL communicator, capped at ``max_ctas`` channels if that is less."""
        options = dist.ProcessGroupNCCL.Options()
        if self.pg_options is not None:
            _copy(self.pg_options, options, _settable(self.pg_options) - _PER_COMMUNICATOR)
            _copy(self.pg_options.config, options.config, _settable(self.pg_options.config))
        if max_ctas is not None:
            _cap(options.config, max_ctas)
        options._timeout = self.timeout
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        return options


def _cap(config: Any, max_ctas: int) -> None:
    """Set a channel cap, unless the group was made with a lower one."""
    own = config.max_ctas
    # NCCL marks what is not set with the lowest int.
    cap = min(own, max_ctas) if own > 0 else max_ctas
    config.max_ctas = cap
    config.min_ctas = min(config.min_ctas, cap) if config.min_ctas > 0 else 1


def _copy(source: Any, target: Any, names: set[str]) -> None:
    for name in names:
        value = getattr(source, name)
        if value is not None:  # a text that was not given reads as None and cannot be set to it
            setattr(target, name, value)


def _settable(options: Any) -> set[str]:
    """Names of the plain data attributes of an options object of torch, whatever the release has."""
    names = {name for name in dir(options) if not name.startswith("__")}
    return {name for name in names if isinstance(getattr(type(options), name, None), property)}


def _comparable(pg_options: Any) -> tuple[object, ...]:
    if pg_options is None:
        return ()
    config = getattr(pg_options, "config", None)
    own = [(name, repr(getattr(pg_options, name))) for name in _settable(pg_options) - _PER_COMMUNICATOR]
    of_config = [(name, repr(getattr(config, name))) for name in _settable(config)] if config else []
    return (type(pg_options).__name__, *sorted(own), *sorted(of_config))
