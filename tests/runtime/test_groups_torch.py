"""What torch builds upon groups works over managed ones as over plain gloo, with switches in between.

Functional collectives, device meshes and DTensor; FSDP2 and DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from group_world import Way
from rank_server import on_ranks

pytestmark = pytest.mark.megatron

RANKS = 4


def compare(case: Callable[[str, str], dict[str, Any]], store: Path) -> None:
    """Results of all ranks, to the last bit."""
    plain = on_ranks(case, RANKS, Way.PLAIN, str(store))
    for way in (Way.REBUILT, Way.SHARED):
        managed = on_ranks(case, RANKS, way, "")
        for rank, (expected, found) in enumerate(zip(plain, managed, strict=True)):
            assert found.keys() == expected.keys()
            for what in expected:
                assert found[what] == expected[what], f"{way}, rank {rank}: {what} differs"


def test_functional_collectives_meshes_and_distributed_tensors(tmp_path: Path) -> None:
    from group_functional import case_functional  # takes seconds to import: not wherever tests are collected

    compare(case_functional, tmp_path / "store")


def test_training_with_fsdp2_and_ddp(tmp_path: Path) -> None:
    from group_training import case_training

    compare(case_training, tmp_path / "store")
