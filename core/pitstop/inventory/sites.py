"""Communicators as a class of ranks has them, and the classes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pitstop.inventory.groups import WORLD_GROUP_NAME, Group
from pitstop.inventory.kinds import Backend
from pitstop.inventory.lanes import shared_parts
from pitstop.inventory.placement import Span, span_of
from pitstop.inventory.stages import Stage
from pitstop.inventory.use import Use
from pitstop.scenario import Hardware


@dataclass(frozen=True, slots=True)
class CommunicatorSite:
    """One communicator as a class of ranks has it: what it is, how large, and where its members sit.

    ``names`` are the Megatron groups that it carries (several if equal rank sets share one communicator) and
    ``config_names`` their keys in ``nccl_communicator_config_path``. ``ranks`` are those of the class's
    representative; ``size``, ``nodes`` and ``gpus`` hold for every rank of the class.
    """

    names: tuple[str, ...]
    config_names: tuple[str | None, ...]
    backend: Backend
    size: int
    nodes: int
    gpus: int
    uses: frozenset[Use]
    hot: bool
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: Group, hardware: Hardware) -> CommunicatorSite:
        """The site of a group on a machine."""
        span: Span = span_of(group.ranks, hardware)
        return cls(
            names=(group.name,),
            config_names=(group.config_name,),
            backend=group.backend,
            size=group.size,
            nodes=span.nodes,
            gpus=span.gpus,
            uses=group.uses,
            hot=group.hot,
            ranks=group.ranks,
        )

    @property
    def same_gpu(self) -> bool:
        """Whether its ranks, more than one, all sit on one GPU."""
        return self.gpus == 1 and self.size > 1

    @property
    def is_managed(self) -> bool:
        """Whether it is worth managing: NCCL, and more than one rank."""
        return self.backend is Backend.NCCL and self.size > 1

    @property
    def is_world(self) -> bool:
        """Whether this is torch's default group."""
        return self.names == (WORLD_GROUP_NAME,)


def fold_sites(sites: Sequence[CommunicatorSite]) -> tuple[CommunicatorSite, ...]:
    """Sites with equal ranks and backend as one site each; the default group stays alone."""
    folded: dict[tuple[object, ...], list[CommunicatorSite]] = {}
    for site in sites:
        folded.setdefault((site.backend, site.ranks, site.is_world), []).append(site)
    return tuple(_merged(same) for same in folded.values())


def share_sites(sites: Sequence[CommunicatorSite]) -> tuple[CommunicatorSite, ...]:
    """Sites as a plan with ``share`` makes them: equal ranks and backend, and no overlap on purpose (``lanes``)."""
    parts = shared_parts(sites, lambda site: site.names[0], lambda site: (site.backend, site.ranks))
    return tuple(_merged(part) for part in parts)


def _merged(same: Sequence[CommunicatorSite]) -> CommunicatorSite:
    first = same[0]
    if len(same) == 1:
        return first
    return CommunicatorSite(
        names=tuple(name for site in same for name in site.names),
        config_names=tuple(name for site in same for name in site.config_names),
        backend=first.backend,
        size=first.size,
        nodes=first.nodes,
        gpus=first.gpus,
        uses=frozenset().union(*(site.uses for site in same)),
        hot=any(site.hot for site in same),
        ranks=first.ranks,
    )


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks with the same costs: ``count`` of them, the lowest of which is the ``representative``.

    ``sites`` has one entry per group of the representative, in Megatron's order, gloo groups and groups of
    one rank included; ``world`` is the default group.
    """

    representative: int
    count: int
    stage: Stage
    sites: tuple[CommunicatorSite, ...]
    world: CommunicatorSite

    def communicators(self, use: Use | None = None, share: bool = False) -> tuple[CommunicatorSite, ...]:
        """Communicators worth managing, the default group excluded.

        Args:
            use: only those that a training step or an export uses (lazy creation); None: all (eager
                creation).
            share: groups with equal rank sets share communicators, as under a plan with ``share``.
        """
        chosen = tuple(s for s in self.sites if s.is_managed and (use is None or use in s.uses))
        return share_sites(chosen) if share else chosen
