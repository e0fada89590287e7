"""The groups of one rank, and the folding of groups with equal ranks into one communicator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pitstop.errors import FieldProblem, InvalidScenarioError
from pitstop.inventory.kinds import Backend, GroupKind, group_kinds
from pitstop.inventory.partition import PIPELINE, Members, Ranks, groups_matrix
from pitstop.inventory.stages import stages_of
from pitstop.inventory.topology import Topology
from pitstop.inventory.use import UNUSED, Place, StepOptions, Use, use_by_kind
from pitstop.scenario import Scenario

WORLD_GROUP_NAME = "default_pg"
_CACHED_TOPOLOGIES = 2


@dataclass(frozen=True, slots=True)
class Group:
    """One process group of one rank.

    ``name`` is Megatron's ``group_desc``, ``config_name`` its key in ``nccl_communicator_config_path`` (None
    if it has none), ``ranks`` the global ranks, ascending, as torch sorts them. ``hot`` marks the groups that
    carry the bulk of forward, backward or gradient exchange.
    """

    name: str
    config_name: str | None
    backend: Backend
    ranks: tuple[int, ...]
    uses: frozenset[Use] = frozenset()
    hot: bool = False

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def is_single(self) -> bool:
        """A group of one rank: a collective may give it a communicator, but one not worth managing."""
        return len(self.ranks) == 1

    @property
    def is_managed(self) -> bool:
        """Whether its communicator is worth managing: NCCL, and more than one rank."""
        return self.backend is Backend.NCCL and not self.is_single

    @property
    def is_world(self) -> bool:
        """Whether this is torch's default group, which never shares a communicator with others."""
        return self.name == WORLD_GROUP_NAME


class Partitions:
    """Rank sets of every kind of group of a topology, computed once per recipe."""

    __slots__ = ("_matrices", "kinds", "topology")

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.kinds: tuple[GroupKind, ...] = group_kinds(topology)
        self._matrices: dict[Members, Ranks] = {}

    def matrix(self, recipe: Members) -> Ranks:
        """All groups made by a recipe: shape (groups, ranks per group), int64."""
        found = self._matrices.get(recipe)
        if found is None:
            found = self._matrices[recipe] = groups_matrix(self.topology, recipe)
        return found

    def of_rank(self, recipe: Members, rank: int) -> tuple[int, ...] | None:
        """The group that a recipe gives to a rank; None if none (embedding groups of middle stages)."""
        matrix = self.matrix(recipe)
        where = np.flatnonzero(matrix.ravel() == rank)
        if where.size == 0:
            return None
        return tuple(matrix[where[0] // matrix.shape[1]].tolist())


@lru_cache(maxsize=_CACHED_TOPOLOGIES)
def partitions(topology: Topology) -> Partitions:
    """The partitions of a topology; the last two are kept, so that asking for many ranks is cheap."""
    return Partitions(topology)


def groups_of_rank(
    source: Scenario | Topology,
    rank: int,
    megatron_version: str | None = None,
    options: StepOptions | None = None,
) -> tuple[Group, ...]:
    """The groups that ``initialize_model_parallel`` gives to one rank, in the order in which it makes them.

    Args:
        source: a scenario, or a topology with options that a scenario does not have.
        rank: global rank.
        megatron_version: overrides the source's version.
        options: overrides the step options; default: the scenario's, or ``StepOptions()`` for a topology.

    Raises:
        InvalidScenarioError: the layout, the version or the rank is not possible.
    """
    topology, options = resolve(source, megatron_version, options)
    _check_rank(topology, rank)
    parts = partitions(topology)
    ranks_of = {recipe: parts.of_rank(recipe, rank) for recipe in {kind.members for kind in parts.kinds}}
    pipeline = ranks_of[PIPELINE] or (rank,)
    use = use_by_kind(topology, options, _place(source, options, pipeline, rank))
    groups = []
    for kind in parts.kinds:
        ranks = ranks_of[kind.members]
        if ranks is not None:
            used = use.get(kind.name, UNUSED)
            groups.append(Group(kind.name, kind.config_name, kind.backend, ranks, used.uses, used.hot))
    return tuple(groups)


def _place(source: Scenario | Topology, options: StepOptions, pipeline: tuple[int, ...], rank: int) -> Place:
    """Place of a rank in its pipeline; a topology has no layers, so that all its stages count as alike."""
    has_experts = options.moe
    if isinstance(source, Scenario):
        has_experts = has_experts and stages_of(source)[pipeline.index(rank)].moe_layers > 0
    return Place(is_last_stage=rank == pipeline[-1], has_experts=has_experts)


def world_group(source: Scenario | Topology) -> Group:
    """Torch's default group: all ranks. Megatron's groups never share its communicator."""
    world = source.world_size
    return Group(WORLD_GROUP_NAME, None, Backend.NCCL, tuple(range(world)))


@dataclass(frozen=True, slots=True)
class SharedCommunicator:
    """Groups with equal ranks, backend and options, carried by one communicator.

    Used whenever one of its groups is used, and hot if one of them is.
    """

    names: tuple[str, ...]
    backend: Backend
    ranks: tuple[int, ...]
    uses: frozenset[Use]
    hot: bool


def shared_rank_sets(
    groups: Iterable[Group], options: Mapping[str, object] | None = None
) -> tuple[SharedCommunicator, ...]:
    """Fold groups with equal ranks, backend and options into one communicator each, in order of appearance.

    ``options`` gives each ``config_name`` its communicator options (the content of
    ``nccl_communicator_config_path``); without it all groups have the same. The default group stays alone:
    torch uses it behind Megatron's back (barriers, object collectives).
    """
    options = options or {}
    folded: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        own = repr(options.get(group.config_name)) if group.config_name else None
        key = (group.backend, group.ranks, own if options else None, group.is_world)
        folded.setdefault(key, []).append(group)
    return tuple(
        SharedCommunicator(
            names=tuple(g.name for g in same),
            backend=same[0].backend,
            ranks=same[0].ranks,
            uses=frozenset().union(*(g.uses for g in same)),
            hot=any(g.hot for g in same),
        )
        for same in folded.values()
    )


def resolve(
    source: Scenario | Topology, megatron_version: str | None, options: StepOptions | None
) -> tuple[Topology, StepOptions]:
    """Topology and step options of a source, with overrides applied.

    Raises:
        InvalidScenarioError: the layout or the version is not possible.
    """
    if isinstance(source, Scenario):
        return Topology.of(source, megatron_version), options or StepOptions.of(source)
    topology = source if megatron_version is None else source.with_megatron(megatron_version)
    return topology, options or StepOptions(moe=topology.ep > 1)


def _check_rank(topology: Topology, rank: int) -> None:
    if not 0 <= rank < topology.world_size:
        problem = f"is not a rank of a world of {topology.world_size}"
        raise InvalidScenarioError(
            "no such rank",
            [FieldProblem("rank", str(rank), problem, f"Give 0 to {topology.world_size - 1}.")],
        )
