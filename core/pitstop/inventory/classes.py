"""Fold the ranks of a scenario into classes of equal cost, without looking at ranks one by one.

The groups of one kind are rows of a matrix of ranks (``pitstop.inventory.partition``). Nodes and GPUs per
row are computed for all rows at once and spread to the ranks; ranks with equal figures for all kinds form a
class.
"""

from __future__ import annotations

import numpy as np

from pitstop.inventory.groups import Partitions, groups_of_rank, partitions, resolve, world_group
from pitstop.inventory.partition import PIPELINE
from pitstop.inventory.placement import IntArray, spans_of
from pitstop.inventory.sites import CommunicatorSite, RankClass
from pitstop.inventory.stages import stages_of
from pitstop.inventory.use import StepOptions
from pitstop.scenario import Hardware, Scenario


def rank_classes(
    scenario: Scenario, megatron_version: str | None = None, options: StepOptions | None = None
) -> list[RankClass]:
    """All ranks of a scenario, folded into classes of equal cost, ordered by representative.

    Equal means: the same sort of pipeline stage (layers, first, last), the same groups, and for each group
    the same size, number of nodes and number of GPUs.

    Raises:
        InvalidScenarioError: the layout or the version is not possible.
    """
    topology, options = resolve(scenario, megatron_version, options)
    parts, hardware = partitions(topology), scenario.hardware
    stages = stages_of(scenario)
    stage_of_rank = _stage_of_rank(parts)
    sort_of_stage = np.array([stages.index(stage) for stage in stages], dtype=np.int64)
    labels = _compact(sort_of_stage[stage_of_rank])
    for recipe in dict.fromkeys(kind.members for kind in parts.kinds):
        labels = _refined(labels, parts.matrix(recipe), hardware)
    _, representatives, counts = np.unique(labels, return_index=True, return_counts=True)
    world = CommunicatorSite.of(world_group(topology), hardware)
    classes = []
    for i in np.argsort(representatives).tolist():
        rank = int(representatives[i])
        sites = tuple(
            CommunicatorSite.of(group, hardware)
            for group in groups_of_rank(scenario, rank, megatron_version, options)
        )
        classes.append(RankClass(rank, int(counts[i]), stages[int(stage_of_rank[rank])], sites, world))
    return classes


def _stage_of_rank(parts: Partitions) -> IntArray:
    """Pipeline stage of each rank: its column in the pipeline groups."""
    pipelines = parts.matrix(PIPELINE)
    stage = np.empty(parts.topology.world_size, dtype=np.int64)
    stage[pipelines] = np.arange(pipelines.shape[1])
    return stage


def _refined(labels: IntArray, groups: IntArray, hardware: Hardware) -> IntArray:
    """Split classes by what the groups of one kind touch; shape of ``labels``: (world,)."""
    nodes, gpus = spans_of(groups, hardware)
    codes = nodes * (int(gpus.max()) + 1) + gpus
    covers_all = groups.size == labels.size
    if covers_all and (codes == codes[0]).all():
        return labels
    of_rank = np.zeros(
        labels.size, dtype=np.int64
    )  # 0: in no group of this kind; nodes and gpus are at least 1
    of_rank[groups] = codes[:, None]
    dense = _compact(of_rank)
    return _compact(labels * (int(dense.max()) + 1) + dense)


def _compact(labels: IntArray) -> IntArray:
    """Renumber labels 0, 1, 2, ... in their order, so that products of two numberings stay small."""
    top = int(labels.max()) + 1
    if top > 4 * labels.size + 1024:
        return np.unique(labels, return_inverse=True)[1].astype(np.int64)
    present = np.bincount(labels, minlength=top) > 0
    numbers: IntArray = np.cumsum(present) - 1
    return numbers[labels]
