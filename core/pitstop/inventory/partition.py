"""The rank sets of all groups of one kind, as one integer matrix: a row per group, in Megatron's order.

Megatron numbers ranks in mixed radix: ``rank = sum(coordinate[axis] * stride[axis])``, the first axis of
``order`` being the fastest. Laid out as an array with one dimension per axis, the groups over some axes are
what is left when those axes are moved to the end: no rank needs to be looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pitstop.inventory.topology import DEFAULT_ORDER, GTP, Topology

Ranks = NDArray[np.int64]


class Grid(Enum):
    """Which numbering of the ranks a group follows: Megatron has one for dense and one for expert layers."""

    DENSE = "dense"
    EXPERT = "expert"


class Form(Enum):
    """What becomes of the groups over the axes.

    PLAIN: as they are. CHUNKS: each cut into ``parts`` consecutive pieces. STRIDED: each dealt out so that
    one piece takes one member of every such chunk. ENDS: first and last member. FIRST: first member. JOINED:
    ``parts`` consecutive groups made one. WORLD: all ranks.
    """

    PLAIN = "plain"
    CHUNKS = "chunks"
    STRIDED = "strided"
    ENDS = "ends"
    FIRST = "first"
    JOINED = "joined"
    WORLD = "world"


@dataclass(frozen=True, slots=True)
class Members:
    """Recipe for the rank sets of one kind of group; ``parts`` belongs to CHUNKS, STRIDED and JOINED."""

    grid: Grid
    axes: frozenset[str]
    form: Form = Form.PLAIN
    parts: int = 1
    default_order: bool = False
    """Follow the default order whatever the layout says, as ``create_all_gather_groups`` does."""


def members(
    grid: Grid, axes: str, form: Form = Form.PLAIN, parts: int = 1, default_order: bool = False
) -> Members:
    """A recipe with its axes in Megatron's notation (``tp-dp-cp``)."""
    return Members(grid, frozenset(axes.split("-")), form, parts, default_order)


PIPELINE = members(Grid.DENSE, "pp")


def axis_sizes(topology: Topology, grid: Grid, order: str) -> dict[str, int]:
    """Size of each axis, fastest first; axes that the order leaves out come last (they have size 1)."""
    t = topology
    if grid is Grid.DENSE:
        sizes = {"tp": t.tp, "pp": t.pp, "dp": t.dp, "ep": 1, "cp": t.cp, GTP: t.gtp}
        anchor = "tp"
    else:
        sizes = {"tp": t.expert_tp, "pp": t.pp, "dp": t.expert_dp, "ep": t.ep, "cp": 1, GTP: t.egtp}
        anchor = "ep"
    tokens = order.split("-")
    # 0.19 puts gtp right after tp on the dense grid and right after ep on the expert grid. Where the anchor
    # is left out of the order it has size 1, and so the place makes no difference unless gtp is in use: then
    # it follows tp.
    after = anchor if anchor in tokens else "tp"
    tokens.insert(tokens.index(after) + 1 if after in tokens else 0, GTP)
    tokens += [name for name in sizes if name not in tokens]
    return {name: sizes[name] for name in tokens}


def groups_matrix(topology: Topology, recipe: Members) -> Ranks:
    """All groups of one kind in Megatron's order, ranks ascending: shape (groups, ranks per group), int64."""
    if recipe.form is Form.WORLD:
        return np.arange(topology.world_size, dtype=np.int64)[None, :]
    sizes = axis_sizes(topology, recipe.grid, DEFAULT_ORDER if recipe.default_order else topology.order)
    slowest_first = list(reversed(sizes))
    ranks = np.arange(topology.world_size, dtype=np.int64).reshape([sizes[axis] for axis in slowest_first])
    inside = [i for i, axis in enumerate(slowest_first) if axis in recipe.axes]
    outside = [i for i, axis in enumerate(slowest_first) if axis not in recipe.axes]
    size = int(np.prod([ranks.shape[i] for i in inside], dtype=np.int64))
    return _shaped(ranks.transpose(outside + inside).reshape(-1, size), recipe)


def _shaped(plain: Ranks, recipe: Members) -> Ranks:
    count, size = plain.shape
    match recipe.form:
        case Form.CHUNKS:
            return plain.reshape(count * recipe.parts, size // recipe.parts)
        case Form.STRIDED:
            dealt = plain.reshape(count, recipe.parts, size // recipe.parts).transpose(0, 2, 1)
            return dealt.reshape(-1, recipe.parts)
        case Form.ENDS:
            return plain[:, [0, -1]] if size > 1 else plain
        case Form.FIRST:
            return plain[:, :1]
        case Form.JOINED:
            # Megatron lists these ranks group by group; torch sorts the ranks of every group that it makes.
            return np.sort(plain.reshape(count // recipe.parts, size * recipe.parts), axis=1)
        case _:
            return plain
