"""Which communicators each rank has: Megatron-core's process groups in closed form, without torch.

``groups_of_rank`` lists one rank's groups as the library makes them; ``shared_rank_sets`` folds equal ones;
``rank_classes`` folds all ranks of a scenario into classes of equal cost. See ``use`` for which groups a
training step and a weight export really use.
"""

from pitstop.inventory.classes import rank_classes
from pitstop.inventory.groups import Group, SharedCommunicator, groups_of_rank, shared_rank_sets, world_group
from pitstop.inventory.kinds import Backend
from pitstop.inventory.sites import CommunicatorSite, RankClass, fold_sites, share_sites
from pitstop.inventory.stages import Stage, stages_of
from pitstop.inventory.topology import Topology
from pitstop.inventory.use import StepOptions, Use
from pitstop.inventory.versions import MegatronRules, megatron_rules

__all__ = [
    "Backend",
    "CommunicatorSite",
    "Group",
    "MegatronRules",
    "RankClass",
    "SharedCommunicator",
    "Stage",
    "StepOptions",
    "Topology",
    "Use",
    "fold_sites",
    "groups_of_rank",
    "megatron_rules",
    "rank_classes",
    "share_sites",
    "shared_rank_sets",
    "stages_of",
    "world_group",
]
