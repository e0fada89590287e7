"""Where ranks sit, and how many nodes and GPUs a group of them touches.

Rank ``r`` is on node ``r // ranks_per_node``. Inside a node its GPU is ``local_rank % gpus_per_node``: ranks
that share a GPU are dealt out round robin, so that rank 0 and rank ``gpus_per_node`` share the first GPU.
The bundled measurements with several ranks per GPU were placed in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pitstop.scenario import Hardware

IntArray = NDArray[np.int64]


class Span(NamedTuple):
    """Distinct nodes and distinct GPUs that a group touches."""

    nodes: int
    gpus: int


def node_of(ranks: IntArray, hardware: Hardware) -> IntArray:
    """Node of each rank; any shape."""
    return ranks // hardware.ranks_per_node


def gpu_of(ranks: IntArray, hardware: Hardware) -> IntArray:
    """GPU of each rank, numbered across all nodes; any shape."""
    nodes, local = np.divmod(ranks, hardware.ranks_per_node)
    gpus: IntArray = nodes * hardware.gpus_per_node + local % hardware.gpus_per_node
    return gpus


def spans_of(groups: IntArray, hardware: Hardware) -> tuple[IntArray, IntArray]:
    """Distinct nodes and GPUs of each group.

    Args:
        groups: shape (groups, ranks per group).
        hardware: the machines.

    Returns:
        Two arrays of shape (groups,): nodes and GPUs.
    """
    nodes = _distinct(node_of(groups, hardware))
    if hardware.ranks_per_gpu == 1:
        return nodes, np.full(groups.shape[0], groups.shape[1], dtype=np.int64)
    return nodes, _distinct(gpu_of(groups, hardware))


def span_of(ranks: Sequence[int], hardware: Hardware) -> Span:
    """Distinct nodes and GPUs of one group."""
    nodes, gpus = spans_of(np.asarray(ranks, dtype=np.int64)[None, :], hardware)
    return Span(int(nodes[0]), int(gpus[0]))


def _distinct(values: IntArray) -> IntArray:
    """Distinct values in each row; rows are sorted only if they are not yet (nodes usually are)."""
    if values.shape[1] == 1:
        return np.ones(values.shape[0], dtype=np.int64)
    steps = np.diff(values, axis=1)
    if (steps < 0).any():
        steps = np.diff(np.sort(values, axis=1), axis=1)
    distinct: IntArray = np.count_nonzero(steps, axis=1).astype(np.int64) + 1
    return distinct
