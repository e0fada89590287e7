"""The cost laws: seconds and bytes of every part of a switch, for one class of ranks and all Monte Carlo draws.

Laws are physical, so that they carry over to a layout nobody ran:

- memory of a communicator = base + channels x bytes per channel (+ network buffers across nodes)
- create = fixed + bytes / mapping rate, times 1 + k (1 - 1/ranks) where ranks share a GPU (+ a part per node doubling)
- release = waiting for the communicator's proxy thread, which polls with a timeout of 500 ms (NCCL, src/proxy.cc): the
  work itself hides in that wait. Each thread's phase is set when its communicator is made. Communicators made back to
  back and destroyed in the same order are therefore released at the spacing of their creation; those made at
  unrelated times wait half a period each on average. ``evidence/scripts/measure_communicators.py`` shows both.
- pause = bytes x (copy + allocation of pinned memory unless the backup is retained); resume likewise, with its release
- gather = bytes / min(channels x rate per channel, link rate); by copies: parts x seconds per part + bytes / rate
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pitstop.inventory import CommunicatorSite, RankClass, Use, fold_sites, share_sites
from pitstop.inventory.caps import cap_of
from pitstop.inventory.lanes import is_bulk
from pitstop.plan import Backup, Export, Plan
from pitstop.scenario import EngineName, GroupCreation, Scenario
from pitstop.sizing import rank_bytes, total_parameters
from pitstop.units import GB, GIB, MIB

from .calibration import Array, Draws

PROXY_POLL_S = 0.5
"""Timeout of the poll in NCCL's proxy service and UDS threads (src/proxy.cc); the same on every GPU."""

BF16_BYTES = 2

SHARING_CHANNELS = 16
"""Channels up to which a gather among ranks that share a GPU gets faster (h200x2-runtime, 4 against 16 channels)."""

COPIES_PART_BYTES = 32 * MIB
"""Bytes of a shard that a rank offers to its peers at a time (``pitstop_runtime.groups.copies``); two such buffers."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator of a class under a plan; arrays have shape (draws,)."""

    site: CommunicatorSite
    bytes: Array
    create_s: Array
    suspend_s: Array
    resume_s: Array
    canary_s: Array

    @property
    def in_step(self) -> bool:
        """Whether a training step uses it."""
        return Use.STEP in self.site.uses

    @property
    def in_export(self) -> bool:
        """Whether the weight export uses it."""
        return Use.EXPORT in self.site.uses


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """What a site's own baseline says of the parts that fill a phase; shape (draws,) each, 1 without site evidence."""

    pause: Array
    load: Array
    resume: Array

    @classmethod
    def none(cls, draws: Draws) -> SiteFactors:
        """No site evidence."""
        one = np.ones(draws.count)
        return cls(one, one, one)


class ClassCosts:
    """Costs of one class of ranks."""

    def __init__(self, scenario: Scenario, cls: RankClass, draws: Draws) -> None:
        self.scenario, self.cls, self.draws = scenario, cls, draws
        self.ranks_per_gpu = scenario.hardware.ranks_per_gpu
        sizes = rank_bytes(scenario, cls.stage)
        override = scenario.trainer.saved_bytes_per_rank
        self.saved_bytes = sizes.saved_bytes if override is None else override
        shard = scenario.trainer.export_bytes_per_rank
        if shard is not None:
            self.gathered_bytes = shard * scenario.layout.tp
        else:
            self.gathered_bytes = total_parameters(scenario.model) * BF16_BYTES
        nodes = [s.nodes for s in cls.communicators(Use.EXPORT)]
        self.export_nodes = max(nodes, default=1)

    # -- communicators ---------------------------------------------------------------------------------------------

    def live(self, plan: Plan) -> list[Communicator]:
        """Communicators alive while training under ``plan``, in order of creation."""
        sites = [site for site in self.cls.sites if site.is_managed]
        if self.scenario.trainer.manage_world and self.cls.world.is_managed:
            sites.insert(0, self.cls.world)
        if plan.share:
            sites = list(share_sites(sites))
        if self.scenario.trainer.group_creation is GroupCreation.LAZY:
            sites = [site for site in sites if site.uses]
        return [self.communicator(site, self._cap(site, plan)) for site in sites]

    @staticmethod
    def _cap(site: CommunicatorSite, plan: Plan) -> int | None:
        """As the runtime does it, which does not know what of its groups a step uses."""
        bulk = not site.is_world and any(is_bulk(name) for name in site.names)
        return cap_of(plan.cold_max_ctas, plan.hot_max_ctas, bulk=bulk, same_gpu=site.same_gpu)

    def export_only(self, plan: Plan) -> list[Communicator]:
        """The dedicated export communicators of ``plan``: one per rank set that the export uses."""
        if plan.export is not Export.COMMUNICATOR:
            return []
        sites = fold_sites(self.cls.communicators(Use.EXPORT))
        return [self.communicator(site, plan.export_max_ctas) for site in sites]

    def communicator(self, site: CommunicatorSite, cap: int | None) -> Communicator:
        """Price one communicator with at most ``cap`` channels (None: the library's choice)."""
        d = self.draws
        channels = d["comm.channels_same_gpu"] if site.same_gpu else d["comm.channels_direct"]
        if cap is not None:
            channels = np.minimum(channels, cap)
        size = d["comm.base_bytes"] + channels * d["comm.channel_bytes"]
        sharing = 1 + d["create.sharing"] * (1 - 1 / self.ranks_per_gpu)
        mapped_mib = size / MIB
        create = (d["create.fixed_s"] + d["create.s_per_mib"] * mapped_mib) * sharing
        if site.nodes > 1:
            size = size + d["comm.network_bytes"]
            create = create + d["create.per_node_doubling_s"] * np.log2(site.nodes)
        return Communicator(
            site=site,
            bytes=size,
            create_s=create,
            suspend_s=(d["suspend.fixed_s"] + d["suspend.s_per_mib"] * mapped_mib) * sharing,
            resume_s=(d["resume.fixed_s"] + d["resume.s_per_mib"] * mapped_mib) * sharing,
            canary_s=d["canary.s"] + d["canary.sharing_s"] * self.ranks_per_gpu * (self.ranks_per_gpu - 1),
        )

    def release_s(
        self, communicators: list[Communicator], waits: Array, *, side_by_side: bool = False
    ) -> Array:
        """Seconds to destroy communicators, one after the other or side by side.

        Args:
            communicators: in the order of creation, which is also that of release.
            waits: mean waits for a random poll phase, shape (at least len(communicators), draws).
            side_by_side: all at once, which takes as long as the latest of all their threads' polls.
        """
        if not communicators:
            return np.zeros(self.draws.count)
        if side_by_side:
            return np.full(self.draws.count, PROXY_POLL_S)
        if self.scenario.trainer.group_creation is GroupCreation.LAZY:
            return np.asarray(waits[: len(communicators)].sum(axis=0))
        spacing = sum(
            (np.mod(c.create_s, PROXY_POLL_S) for c in communicators[1:]), np.zeros(self.draws.count)
        )
        return np.asarray(waits[0] + spacing)

    # -- the rest --------------------------------------------------------------------------------------------------

    def clear_s(self) -> Array:
        """Clearing memory before the pause."""
        return self.draws["clear.s"] * float(self.scenario.trainer.clear_memory)

    def pause_s(self, backup: Backup, factors: SiteFactors) -> Array:
        """Saver pause: copies share the GPU's PCIe link, pinned allocations contend on the node."""
        return self._saver_s("saver.pause_s_per_gib", "host.alloc", backup) * factors.pause

    def resume_s(self, backup: Backup, factors: SiteFactors) -> Array:
        """Saver resume: the copy back, and releasing the pinned backup unless it is retained."""
        return self._saver_s("saver.resume_s_per_gib", "host.free", backup) * factors.resume

    def _saver_s(self, copy: str, host: str, backup: Backup) -> Array:
        seconds = self.draws[copy] * self.ranks_per_gpu
        if backup is Backup.REALLOCATE:
            contention = np.minimum(self.draws[f"{host}_contention"], 1.0)
            seconds = (
                seconds + self.draws[f"{host}_s_per_gib"] * self.scenario.hardware.ranks_per_node**contention
            )
        return np.asarray(seconds * (self.saved_bytes / GIB))

    def gather_s(self, cap: int | None) -> Array:
        """Gathering weight shards over communicators of at most ``cap`` channels."""
        d = self.draws
        if not self.cls.communicators(Use.EXPORT):
            return np.zeros(d.count)
        rate = d["gather.gb_per_s_link"]
        if cap is not None:
            rate = np.minimum(rate, cap * d["gather.gb_per_s_channel"])
        tensor = [s for s in self.cls.communicators(Use.EXPORT) if "TENSOR_MODEL_PARALLEL_GROUP" in s.names]
        if any(site.size > site.gpus for site in tensor):
            # Ranks of one communicator take turns on their GPU, and a turn moves what the channels hold.
            channels = min(cap or SHARING_CHANNELS, SHARING_CHANNELS)
            rate = np.minimum(rate, channels * d["gather.gb_per_s_channel_sharing"])
        if self.export_nodes > 1:
            rate = np.minimum(rate, d["gather.gb_per_s_network"])
        return np.asarray(self.gathered_bytes / GB / rate)

    def copies_s(self) -> Array:
        """Gathering weight shards by copies: ranks meet after each part, and share their GPU's copy rate."""
        d = self.draws
        if not self.cls.communicators(Use.EXPORT):
            return np.zeros(d.count)
        shard_bytes = self.gathered_bytes / self.scenario.layout.tp
        parts = shard_bytes / COPIES_PART_BYTES
        per_gpu = (self.gathered_bytes - shard_bytes) * self.ranks_per_gpu
        return np.asarray(parts * d["copies.s_per_part"] + per_gpu / GB / d["copies.gb_per_s_gpu"])

    def transfer_s(self) -> Array:
        """Flattening and serialising the gathered weights for the engine's process."""
        return self.draws["transfer.s_per_gib"] * (self._engine_bytes() / GIB)

    def load_s(self, factors: SiteFactors) -> Array:
        """The engine's own copy of its shard."""
        shard_gib = self._engine_bytes() / GIB / self.scenario.engine.tp
        return self.draws["load.s_per_gib"] * shard_gib * factors.load

    def _engine_bytes(self) -> float:
        return 0.0 if self.scenario.engine.name is EngineName.NONE else float(self.gathered_bytes)

    def handles_s(self, groups: int) -> Array:
        """Rendezvous-store time for this class's ranks to make ``groups`` handles; the store serves one at a time."""
        return self.draws["store.request_s"] * groups * self.cls.count

    def overhead_bytes(self) -> Array:
        """Bytes per rank that outlive every switch: the CUDA context and what NCCL keeps once it has run."""
        communicates = any(site.is_managed for site in (*self.cls.sites, self.cls.world))
        return self.draws["process.context_bytes"] + self.draws["process.nccl_bytes"] * float(communicates)
