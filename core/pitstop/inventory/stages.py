"""Pipeline stages as far as they decide costs: layers of each sort, and embeddings or not."""

from __future__ import annotations

from dataclasses import dataclass

from pitstop.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Stage:
    """One sort of pipeline stage; stages with equal content are equal, wherever they are in the pipeline."""

    dense_layers: int
    moe_layers: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> int:
        """Transformer layers of the stage."""
        return self.dense_layers + self.moe_layers


def stages_of(scenario: Scenario) -> tuple[Stage, ...]:
    """The pipeline stages in order; leading dense layers of an MoE model are counted where they fall."""
    split = scenario.layout.stage_layers(scenario.model.num_layers)
    moe = scenario.model.moe
    leading = scenario.model.num_layers if moe is None else moe.first_dense_layers
    stages, start = [], 0
    for index, layers in enumerate(split):
        dense = max(0, min(layers, leading - start))
        stages.append(Stage(dense, layers - dense, index == 0, index == len(split) - 1))
        start += layers
    return tuple(stages)
