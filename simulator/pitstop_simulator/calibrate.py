"""Calibrate the cost laws on the bundled evidence: the only place where parameters come from.

Held-out rows never enter (``Evidence.fit`` selects by use). Each law's form has a physical reason, given where it is
fitted; ``costs.py`` has the laws themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pitstop.inventory import CommunicatorSite, rank_classes
from pitstop.scenario import Scenario
from pitstop.units import GB, GIB, MIB

from .calibration import Array, Calibration, Ranges
from .collector import Collector, rounded
from .evidence import Evidence, Row, load_evidence
from .fitting import fit_law

_EVIDENCE_GPU = "h200"


def calibrate(evidence: Evidence | None = None) -> Calibration:
    """Fit all laws; deterministic for the evidence."""
    evidence = evidence or load_evidence()
    b = Collector()
    _memory(b, evidence)
    _creation(b, evidence)
    _suspension(b, evidence)
    _canary(b, evidence)
    _saver(b, evidence)
    _gather(b, evidence)
    _engine(b, evidence)
    b.pool_spreads()
    _priors(b)
    _hardware_spread(b, evidence)
    return Calibration.build(evidence.digest, sorted(b.rows), b.parameters, _ranges(evidence))


def _memory(b: Collector, evidence: Evidence) -> None:
    """NCCL allocates per channel, so memory is base + channels x bytes; without a cap, a count set by the link."""
    rows = [r for r in evidence.fit("memory.destroy_freed", corpus="h200x2-lifecycle") if r.max_ctas]
    counts, caps = _column(rows, "communicators"), _column(rows, "max_ctas")
    fit = fit_law(lambda p: counts * (p[0] + p[1] * caps), [4 * MIB, 18 * MIB], rows)
    names = {"comm.base_bytes": "byte", "comm.channel_bytes": "byte/channel"}
    b.add_fit("memory", names, fit, "communicators with 1 to 8 channels, 2 x H200")
    base, channel = fit.medians

    def channels(memory: Array | float) -> Array:
        return np.asarray((memory - base) / channel)

    rows = [r for r in evidence.fit("memory.destroy_freed", corpus="h200x2-lifecycle") if not r.max_ctas]
    count = _column(rows, "communicators")
    fit = fit_law(lambda p: count * (base + channel * p[0]), [26.0], rows)
    b.add_fit(
        "memory", {"comm.channels_direct": "channel"}, fit, "uncapped communicators between two GPUs (NVLink)"
    )
    direct = base + channel * fit.medians[0]
    rows = [
        r for r in evidence.fit("memory.destroy_freed") if "pp" in r.layout and (r.ranks_per_gpu or 1) > 1
    ]
    same, other, share = _columns([_same_gpu_counts(r) for r in rows])
    fit = fit_law(lambda p: share * (same * (base + channel * p[0]) + other * direct), [64.0], rows)
    b.add_fit(
        "memory", {"comm.channels_same_gpu": "channel"}, fit, "Megatron layouts with several ranks per GPU"
    )
    rows = [r for r in evidence.fit("memory.destroy_freed") if r.config == "plain_socket"]
    fit = fit_law(lambda p: _column(rows, "communicators") * (base + channel * p[0]), [1.0], rows)
    b.add_fit("memory", {"comm.channels_socket": "channel"}, fit, "communicators forced onto sockets")
    for name, quantity in (
        ("process.context_bytes", "memory.context"),
        ("process.nccl_bytes", "memory.process_residual"),
    ):
        rows = evidence.fit(quantity)
        b.add_fit(
            "memory",
            {name: "byte"},
            fit_law(lambda p: p[0] * np.ones(3), [500 * MIB], rows),
            "fresh processes",
        )


def _creation(b: Collector, evidence: Evidence) -> None:
    """Creation maps the communicator's buffers: a fixed part and one in proportion to its bytes."""
    rows = evidence.fit("communicator.create", corpus="h200x2-lifecycle")
    mib = np.array([_bytes_of(b, r.max_ctas) for r in rows]) / MIB
    fit = fit_law(lambda p: p[0] + p[1] * mib, [0.02, 3e-4], rows)
    names = {"create.fixed_s": "s", "create.s_per_mib": "s/MiB"}
    b.add_fit("create", names, fit, "single creations with first collective, 1 to 10 in sequence, 5 caps")
    fixed, per_mib = fit.medians
    # Ranks that share a GPU wait for each other in the driver: 1 + k (1 - 1/ranks) tends to a limit, as measured.
    rows = [
        r for r in evidence.select("communicator.create_cold", steady=False) if (r.ranks_per_gpu or 1) > 1
    ]
    same, other, _ = _columns([_same_gpu_counts(r) for r in rows])
    direct = _bytes_of(b, None) / MIB
    same_mib = (b["comm.base_bytes"] + b["comm.channel_bytes"] * b["comm.channels_same_gpu"]) / MIB
    alone = (same + other) * fixed + per_mib * (same * same_mib + other * direct)
    cold = float(
        np.median(
            [
                r.value
                for r in evidence.select("communicator.create_cold", steady=False, corpus="h200x2-lifecycle")
            ]
        )
    )
    cold -= fixed + per_mib * direct
    sharing = 1 - 1 / _column(rows, "ranks_per_gpu")
    fit = fit_law(lambda p: alone * (1 + p[0] * sharing) + cold, [1.5], rows)
    b.add_fit(
        "sharing", {"create.sharing": "1"}, fit, "cold creation of Megatron's groups, 2 and 4 ranks per GPU"
    )


def _suspension(b: Collector, evidence: Evidence) -> None:
    """Suspend and resume unmap and map the same buffers, communicator by communicator."""
    for op in ("suspend", "resume"):
        rows = [
            r for r in evidence.fit(f"communicator.{op}") if r.ranks_per_gpu == 1 and r.config != "plain_thr"
        ]
        count = _column(rows, "communicators")
        mib = count * np.array([_bytes_of(b, r.max_ctas) for r in rows]) / MIB
        fit = fit_law(lambda p, n=count, m=mib: n * p[0] + m * p[1], [0.02, 6e-4], rows)  # type: ignore[misc]
        names = {f"{op}.fixed_s": "s", f"{op}.s_per_mib": "s/MiB"}
        b.add_fit(op, names, fit, "ncclCommSuspend / ncclCommResume, NCCL 2.30.7, 1 to 14 communicators")
    rows = [r for r in evidence.fit("memory.suspend_freed") if r.ranks_per_gpu == 1 and r.layout == "flat"]
    total = np.array([(r.communicators or 1) * _bytes_of(b, r.max_ctas) for r in rows])
    left = np.clip(1 - np.array([r.value for r in rows]) / total, 1e-3, 1)
    b.rows |= {r.id for r in rows}
    spread = float(np.std(np.log(left)))
    b.add_prior(
        "suspend",
        "suspend.left_share",
        "1",
        float(np.median(left)),
        spread,
        "share left after suspend",
        len(rows),
    )


def _canary(b: Collector, evidence: Evidence) -> None:
    rows = evidence.fit("communicator.canary")
    # Ranks that share a GPU take turns on it: each waits for each other one, hence ranks x (ranks - 1).
    count, ranks = _column(rows, "communicators"), _column(rows, "ranks_per_gpu")
    fit = fit_law(lambda p: p[0] + count * (p[1] + p[2] * ranks * (ranks - 1)), [3e-4, 7e-5, 3e-3], rows)
    names = {"canary.once_s": "s", "canary.s": "s", "canary.sharing_s": "s/rank^2"}
    b.add_fit("canary", names, fit, "one small all-reduce per kept communicator after the pause")


def _saver(b: Collector, evidence: Evidence) -> None:
    """Pausing copies; without a retained backup it also allocates pinned memory, which dominates, and frees it again.

    Processes that allocate at the same time on one host slow each other by processes ** contention.
    """
    for op, slow in (("pause", "host.alloc"), ("resume", "host.free")):
        everywhere = evidence.fit(f"saver.{op}")
        # Copying and allocating, from processes that do nothing else; how 8 processes contend, from whole switches.
        rows = [r for r in everywhere if r.corpus != "h200x2-runtime"]
        law = _saver_law(rows)
        fit = fit_law(lambda p, law=law: law(p[0], p[1], p[2]), [0.02, 0.4, 0.2], rows)  # type: ignore[misc]
        names = {f"saver.{op}_s_per_gib": "s/GiB", f"{slow}_s_per_gib": "s/GiB", f"{slow}_contention": "1"}
        b.add_fit(f"saver.{op}", names, fit, "torch_memory_saver 0.0.10, 1 to 8 GiB, backup retained or not")
        copy, fresh, _ = fit.medians
        rows = [r for r in everywhere if r.backup == "reallocate" and (r.world_size or 1) > 1]
        law = _saver_law(rows)
        fit = fit_law(lambda p, law=law, c=copy, f=fresh: law(c, f, p[0]), [0.2], rows)  # type: ignore[misc]
        names = {f"{slow}_contention": "1"}
        b.add_fit("saver.contention", names, fit, "2 to 8 processes that allocate at the same time")


def _saver_law(rows: list[Row]) -> Callable[[float, float, float], Array]:
    """Seconds by copying and allocating (s/GiB each) and the exponent of contention; a GPU's ranks share its link."""
    gib = _column(rows, "payload_bytes") / GIB
    fresh = np.array([float(r.backup == "reallocate") for r in rows])
    ranks, per_gpu = _column(rows, "world_size"), _column(rows, "ranks_per_gpu")

    def law(copy: float, allocate: float, contention: float) -> Array:
        return np.asarray(gib * (copy * per_gpu + fresh * allocate * ranks ** np.minimum(contention, 1.0)))

    return law


def _gather(b: Collector, evidence: Evidence) -> None:
    """An all-gather is bound by its channels, or by the link once there are enough of them."""
    rows = [r for r in evidence.fit("bandwidth.allgather") if r.max_ctas]
    fit = fit_law(lambda p: p[0] * _column(rows, "max_ctas"), [30.0], rows)
    b.add_fit(
        "gather",
        {"gather.gb_per_s_channel": "GB/s/channel"},
        fit,
        "512 MiB all-gather, capped at 1 and 4 channels",
    )
    rows = [
        r for r in evidence.fit("bandwidth.allgather") if r.max_ctas is None and r.config != "plain_socket"
    ]
    fit = fit_law(lambda p: p[0] * np.ones(len(rows)), [500.0], rows)
    b.add_fit("gather", {"gather.gb_per_s_link": "GB/s"}, fit, "512 MiB all-gather, default channels, NVLink")
    rows = evidence.fit("export.gather")
    gb, channels = _column(rows, "payload_bytes") / GB, _column(rows, "max_ctas")
    fit = fit_law(lambda p: gb / (p[0] * channels), [0.6], rows)
    names = {"gather.gb_per_s_channel_sharing": "GB/s/channel"}
    b.add_fit(
        "gather", names, fit, "4 GiB gathered in 64-MiB shards among 4 ranks on 2 GPUs, 4 and 16 channels"
    )


def _engine(b: Collector, evidence: Evidence) -> None:
    rows = evidence.fit("engine.flatten_serialize_gather")
    gib = _column(rows, "payload_bytes") / GIB
    fit = fit_law(lambda p: p[0] * gib, [0.003], rows)
    b.add_fit(
        "transfer", {"transfer.s_per_gib": "s/GiB"}, fit, "flattening and serialising buckets for CUDA IPC"
    )
    transfer = float(fit.medians[0])
    rows = evidence.fit("engine.update_weights")
    gib = _column(rows, "payload_bytes") / GIB
    # Two engine ranks load half of the payload each; the call includes the trainer's share.
    fit = fit_law(lambda p: p[0] * gib / 2 + transfer * gib, [0.02], rows)
    b.add_fit(
        "engine",
        {"load.s_per_gib": "s/GiB"},
        fit,
        "SGLang 0.5.11 update_weights_from_tensor, per engine rank",
    )


def _priors(b: Collector) -> None:
    """Quantities that no fitted row covers: wide, and each with its reason."""
    b.add_prior(
        "clear", "clear.s", "s", 0.4416, 0.8, "vllm-project/vime#442, one reported value on 1 x L20", 1
    )
    b.add_prior(
        "store", "store.request_s", "s", 1e-4, 1.0, "14 new_group calls of 2 ranks took 4 ms in the raw logs"
    )
    for name, unit, median, log_se in (
        ("copies.s_per_part", "s", 2.8e-4, 0.2),
        ("copies.gb_per_s_gpu", "GB/s", 300.0, 0.2),
        ("copies.buffers_s", "s", 0.01, 0.5),
    ):
        b.add_prior(
            "copies", name, unit, median, log_se, "lean-copies on 2 and 8 ranks of two H200, 0.05 s each", 3
        )
    b.add_prior(
        "network",
        "create.per_node_doubling_s",
        "s",
        0.5,
        1.0,
        "NVIDIA/nccl#534: 2 to 4 s per communicator",
        2,
    )
    b.add_prior(
        "network", "comm.network_bytes", "byte", 128e6, 0.7, "NVIDIA/TransformerEngine#163: 128 MB", 1
    )
    b.add_prior(
        "network",
        "gather.gb_per_s_network",
        "GB/s",
        30.0,
        0.8,
        "not measured; one 400 Gbit/s link is 50 GB/s",
    )


def _hardware_spread(b: Collector, evidence: Evidence) -> None:
    """Spread between machines: how far figures reported from other machines lie from the laws fitted on H200."""
    public = {(r.source, r.quantity, r.note): r.value for r in evidence.select(corpus="public")}

    def ratio(source: str, word: str, expected: float) -> float:
        found = [
            v for (s, q, note), v in public.items() if s.endswith(source) and (word in note or word == q)
        ]
        return float(np.log(found[0] / expected))

    pause = b["saver.pause_s_per_gib"] + b["host.alloc_s_per_gib"]
    resume = b["saver.resume_s_per_gib"] + b["host.free_s_per_gib"]
    seconds = [
        ratio("#111", "pause rate", 1 / pause),
        ratio("#111", "resume rate", 1 / resume),
        ratio("#111", "D2H", 1 / b["saver.pause_s_per_gib"]),
        ratio("#111", "H2D", 1 / b["saver.resume_s_per_gib"]),
    ]
    memory = [
        ratio("nccl#964", "communicator_memory", _bytes_of(b, None) / 1e6),
        ratio("nccl#2363", "communicator_memory", _bytes_of(b, None) / MIB),
    ]
    # Two to four ratios pin a spread down badly: add the usual factor for a root mean square of so few values.
    spread_s = float(np.sqrt(np.mean(np.square(seconds)))) * 1.2
    spread_bytes = float(np.sqrt(np.mean(np.square(memory)))) * 1.8
    by_law = {"memory": spread_bytes, "engine": 1.0, "transfer": 1.0}
    for name, parameter in b.parameters.items():
        spread = by_law.get(parameter.law, spread_s)
        b.parameters[name] = parameter.model_copy(update={"log_hardware": rounded(spread)})
    for name in ("comm.channels_direct", "comm.channels_socket"):
        # Channel counts follow the link: a bridge or PCIe gets fewer than NVSwitch by a factor of several.
        b.parameters[name] = b.parameters[name].model_copy(update={"log_hardware": 0.5})


def _bytes_of(b: Collector, cap: int | None) -> float:
    """Bytes of a communicator between two GPUs of one node with ``cap`` channels (None: uncapped)."""
    channels = b["comm.channels_direct"] if cap is None else min(cap, b["comm.channels_direct"])
    return b["comm.base_bytes"] + b["comm.channel_bytes"] * channels


def _same_gpu_counts(row: Row) -> tuple[float, float, float]:
    """For a Megatron row: communicators per rank on one GPU, others, and ranks per GPU."""
    sizes = dict(part for part in (_axis(token) for token in row.layout.split("-")))
    model = "qwen3-30b-a3b" if sizes["ep"] > 1 else "qwen3-8b"
    scenario = Scenario.model_validate(
        {
            "name": "layout",
            "hardware": {"gpu": _EVIDENCE_GPU, "gpus_per_node": 2, "ranks_per_gpu": row.ranks_per_gpu},
            # The measurement set etp to 1 (see the group sizes in evidence/sources).
            "layout": {**sizes, "etp": 1},
            "model": model,
            "versions": {"megatron": "0.19.2"},
        }
    )
    sites: tuple[CommunicatorSite, ...] = rank_classes(scenario)[0].communicators()
    same = sum(site.same_gpu for site in sites)
    return float(same), float(len(sites) - same), float(row.ranks_per_gpu or 1)


def _axis(token: str) -> tuple[str, int]:
    return token[:2], int(token[2:])


def _columns(table: list[tuple[float, float, float]]) -> Array:
    return np.array(table, dtype=np.float64).T


def _column(rows: list[Row], name: str) -> Array:
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def _ranges(evidence: Evidence) -> Ranges:
    rows = [r for r in evidence.rows if r.use.value == "fit"]

    def span(name: str, among: list[Row] = rows) -> tuple[int, int]:
        values = [getattr(r, name) for r in among if getattr(r, name)]
        return min(values), max(values)

    versions = [corpus["versions"] for corpus in evidence.corpora.values() if corpus["kind"] == "measured"]
    return Ranges(
        gpus=sorted({r.gpu for r in rows if r.gpu}),
        world_size=span("world_size"),
        ranks_per_gpu=span("ranks_per_gpu"),
        nodes=(1, 1),
        communicators=span("communicators"),
        saved_bytes=span("payload_bytes", [r for r in rows if r.quantity == "saver.pause"]),
        nccl=sorted({r.nccl for r in rows if r.nccl}),
        torch=sorted({v["torch"] for v in versions if "torch" in v}),
    )
