"""Turn the source tables under evidence/sources into the one schema of evidence/rows.csv.

python evidence/scripts/bundle.py          # rewrite evidence/rows.csv
python evidence/scripts/bundle.py --check  # fail if it is out of date
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parent.parent
SOURCES = EVIDENCE / "sources"
CLOCK_S = 0.001  # parts that are shorter say more of the clock than of the part
UNMEASURED = 100_000  # steps of measure_switch_plans.py from here on set up what follows
MIB = 1024**2
GIB = 1024**3

COLUMNS = (
    "id", "corpus", "kind", "use", "run", "step", "warmup", "quantity", "value", "unit", "n", "gpu", "ranks_per_gpu",
    "world_size", "layout", "nccl", "plan", "communicators", "rank_sets", "max_ctas", "config", "payload_bytes",
    "backup", "source", "note",
)  # fmt: skip
Row = dict[str, object]


def source(name: str) -> list[dict[str, str]]:
    lines = [line for line in (SOURCES / name).read_text().splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(lines))


def communicators() -> Iterator[Row]:
    for r in source("h200x2_communicators.csv"):
        cap = re.search(r"cta(\d+)|nch(\d+)", r["config"])
        run = f"{r['nccl']}/{r['layout']}/{r['config']}/{r['groups']}/{r['world']}"
        common: Row = {
            "kind": "measured", "use": "fit", "run": run, "step": r["iteration"], "gpu": "h200", "layout": r["layout"],
            "ranks_per_gpu": r["ranks_per_gpu"], "world_size": r["world"], "nccl": r["nccl"],
            "communicators": r["groups"], "rank_sets": r["rank_sets"], "config": r["config"],
            "max_ctas": (cap[1] or cap[2]) if cap else "",
        }  # fmt: skip
        op = r["op"]
        if op.endswith("_GBps"):
            yield {
                **common,
                "quantity": f"bandwidth.{op.split('_')[0]}",
                "value": r["seconds"],
                "unit": "GB/s",
            }
            continue
        cold = op == "create" and r["iteration"] == "0"
        warm_up = cold or (op == "suspend" and r["iteration"] == "0")
        name = "communicator.create_cold" if cold else f"communicator.{op}"
        yield {**common, "quantity": name, "value": r["seconds"], "unit": "s", "warmup": warm_up}
        if r["mib_per_gpu"]:
            freed = {"destroy": "destroy_freed", "suspend": "suspend_freed", "create": "create_taken"}[op]
            value = int(r["mib_per_gpu"]) * MIB
            yield {
                **common,
                "quantity": f"memory.{freed}",
                "value": value,
                "unit": "byte/gpu",
                "warmup": warm_up,
            }


def lifecycle() -> Iterator[Row]:
    for r in source("h200x2_lifecycle.csv"):
        common: Row = {
            "kind": "measured", "use": "fit", "run": r["run"], "gpu": "h200", "ranks_per_gpu": 1, "world_size": 2,
            "nccl": "2.28.9", "communicators": r["communicators"], "rank_sets": 1, "max_ctas": r["max_ctas"],
            "layout": "flat",
        }  # fmt: skip
        op = r["op"]
        if op in ("context", "process_residual"):
            yield {**common, "quantity": f"memory.{op}", "value": int(r["mib"]) * MIB, "unit": "byte/rank"}
            continue
        each = r["each_s"].split()
        name = f"communicator.{op}"
        for position, seconds in enumerate(each):
            first = "_first" if op == "destroy" and position == 0 else "_next" if op == "destroy" else ""
            yield {
                **common, "quantity": f"{name}{first}", "value": seconds, "unit": "s", "step": position,
                "communicators": 1, "warmup": op == "create_cold", "note": f"one of {len(each)} in sequence",
            }  # fmt: skip
        freed = "destroy_freed" if op == "destroy" else "create_taken"
        yield {
            **common, "quantity": f"memory.{freed}", "value": int(r["mib"]) * MIB, "unit": "byte/gpu",
            "warmup": op == "create_cold",
        }  # fmt: skip


def saver_sizes() -> Iterator[Row]:
    for r in source("h200x2_saver_sizes.csv"):
        common: Row = {
            "kind": "measured", "use": "fit", "run": r["run"], "step": r["cycle"], "warmup": r["cycle"] == "0",
            "gpu": "h200", "ranks_per_gpu": 1, "world_size": 1, "payload_bytes": int(r["payload_gib"]) * GIB,
            "backup": r["backup"], "unit": "s",
        }  # fmt: skip
        yield {**common, "quantity": "saver.pause", "value": r["pause_s"]}
        yield {**common, "quantity": "saver.resume", "value": r["resume_s"]}


def memory_saver() -> Iterator[Row]:
    for r in source("h200x2_memory_saver.csv"):
        retain = r["mode"].endswith("retain")
        common: Row = {
            "kind": "measured", "use": "fit", "run": f"{r['mode']}/{r['payload_gib']}", "step": r["iteration"],
            "warmup": retain and r["iteration"] == "0", "gpu": "h200", "ranks_per_gpu": 1, "world_size": 2,
            "nccl": r["nccl"], "payload_bytes": int(r["payload_gib"]) * GIB, "unit": "s",
            "backup": "retain" if retain else "reallocate",
        }  # fmt: skip
        yield {**common, "quantity": "saver.pause", "value": r["saver_pause_s"]}
        # With retained backups, the resume after the first (allocating) pause already runs at full speed.
        yield {**common, "quantity": "saver.resume", "value": r["saver_resume_s"]}
        if r["mode"].startswith("suspend"):
            groups: Row = {
                **common,
                "communicators": r["groups"],
                "rank_sets": 1,
                "warmup": r["iteration"] == "0",
            }
            yield {**groups, "quantity": "communicator.suspend", "value": r["pg_suspend_s"]}
            yield {**groups, "quantity": "communicator.resume", "value": r["pg_resume_s"], "warmup": False}


def switches(name: str) -> Iterator[Row]:
    for r in source(name):
        released = "export_cap" in r
        plan = "lean-released" if released else r["plan"]
        # These shared one communicator per rank set, which no plan does any more: groups of other lanes keep theirs.
        outdated = plan in SHARING
        overlap = "par" if r.get("overlap_threads") == "True" else "seq"
        run = f"{r['world']}/cap{r['export_cap']}/{overlap}" if released else f"{r['world']}/{plan}"
        common: Row = {
            "kind": "measured", "use": "context" if outdated else "holdout", "run": run, "step": r["cycle"],
            "warmup": r["cycle"] == "0", "gpu": "h200", "ranks_per_gpu": r["ranks_per_gpu"],
            "world_size": r["world"], "layout": f"tp{r['tp']}",
            "nccl": "2.30.7", "plan": plan, "payload_bytes": 8 * GIB, "max_ctas": r.get("export_cap", ""),
            "communicators": r.get("communicators") or r["training_communicators"], "config": overlap if released else "",  # noqa: E501
        }  # fmt: skip
        yield {**common, "quantity": "switch", "value": r["switch_s"], "unit": "s"}
        for column in r:
            if column.endswith("_s") and column != "switch_s":
                yield {**common, "quantity": f"part.{column[:-2]}", "value": r[column], "unit": "s"}
        for moment in ("held_at_sync", "held_in_rollout"):
            value = int(r[f"{moment}_mib"]) * MIB
            yield {**common, "quantity": moment, "value": value, "unit": "byte/gpu"}


RUNTIME_LAYOUTS = {
    "tp2": "tp2",
    "tp2dp2": "tp2-dp2",
    "tp4dp2": "tp4-dp2",
    "tp4cp2ep8": "tp4-cp2-ep8",
    "tp2pp2dp2": "tp2-pp2-dp2",
}
SHARING = ("lean", "lean-released", "lean-copies")


def runtime_switches() -> Iterator[Row]:
    """Step records of the runtime: one file per fresh process, beside its facts."""
    for path in sorted((SOURCES / "switches").glob("*.jsonl")):
        name, repeat = path.stem.rsplit("-", 1)
        facts = json.loads(path.with_suffix(".json").read_text())
        world = {"tp2": 2, "tp2dp2": 4}.get(name, 8)
        place: Row = {
            "kind": "measured", "run": f"{name}/{repeat}", "gpu": "h200", "ranks_per_gpu": world // 2,
            "world_size": world, "layout": RUNTIME_LAYOUTS[name], "nccl": "2.30.7",
        }  # fmt: skip
        # First runs are for fitting, later ones are held out. Two of the first left the library 64 channels between
        # ranks of one GPU; since then a cap leaves them 32.
        first = repeat == "1"
        copied = False
        for line in path.read_text().splitlines():
            record = json.loads(line)
            # Until peers' memory was mapped through one's own GPU, the first export by copies made a context on each
            # other GPU, 528 MiB per process that stay for good: what is held from then on is not the plan's.
            copied = copied or (record["plan"] == "lean-copies" and "ipc_own_gpu" not in facts)
            if record["step"] < UNMEASURED:
                yield from _step_rows(record, place, facts["hot_max_ctas"], first, copied)
        for kind in ("own", "shared"):
            if communicators := facts.get(f"{kind}_communicators"):
                yield {
                    **place, "use": "context", "quantity": f"memory.{kind}_communicators", "unit": "byte/rank",
                    "value": round(sum(each["mib"] for each in communicators) * MIB),
                    "communicators": len(communicators), "max_ctas": facts["hot_max_ctas"] or "",
                }  # fmt: skip
            for group, rates in facts.get(f"{kind}_bandwidth", {}).items():
                yield {
                    **place, "use": "context", "quantity": f"bandwidth.{kind}_ratio", "unit": "1",
                    "value": rates["ratio"], "note": f"{group}: all-reduce of 128 MiB, managed over torch's own",
                }  # fmt: skip


def _step_rows(
    record: dict[str, Any], place: Row, hot_ctas: int | None, first: bool, copied: bool
) -> Iterator[Row]:
    shares = record["plan"] in SHARING
    common: Row = {
        **place, "use": "context" if first else "holdout", "step": record["step"],
        "plan": record["plan"], "payload_bytes": 8 * GIB,
        "max_ctas": (hot_ctas or "") if shares else "", "backup": "retain" if shares else "reallocate",
        "communicators": record["counts"]["communicators"],
    }  # fmt: skip
    phases = record["phases"]
    seconds = {"switch": sum(found["total_s"] for found in phases.values())}
    for phase, found in phases.items():
        seconds[phase] = found["total_s"]
        seconds |= {f"part.{phase}.{part}": s for part, s in found["components_s"].items()}
        seconds |= {f"beside.{phase}.{part}": s for part, s in found.get("overlapped_s", {}).items()}
    for quantity, value in seconds.items():
        if value >= CLOCK_S:
            yield {**common, "quantity": quantity, "value": f"{value:.6f}", "unit": "s"}
    if first:
        yield from _laws(record["plan"], common, seconds, hot_ctas)
    for moment in ("held_at_sync", "held_in_rollout"):
        value = record["memory"][f"{moment}_bytes"]
        row: Row = {**common, "quantity": moment, "value": value, "unit": "byte/gpu"}
        if copied:
            row |= {"use": "context", "note": "528 MiB more per process: contexts on the other GPU"}
        yield row


def _laws(plan: str, common: Row, seconds: dict[str, float], hot_ctas: int | None) -> Iterator[Row]:
    """What laws are fitted to, of plans under which nothing else is under way."""
    per_gpu = int(str(common["ranks_per_gpu"]))
    fitted: Row = {**common, "use": "fit", "unit": "s"}
    if plan in ("lean", "lean-released") and per_gpu == 4 and "tp4" in str(common["layout"]):
        channels = 4 if plan == "lean-released" else hot_ctas
        value = f"{seconds['part.update_weights.weights.gather']:.6f}"
        gathered: Row = {"quantity": "export.gather", "payload_bytes": 4 * GIB, "max_ctas": channels}
        yield {**fitted, **gathered, "value": value}
    if plan in ("reload", "keep", "keep-window", "lean"):
        for phase, part in (("sleep", "saver.pause"), ("wake_up", "saver.resume")):
            value = f"{seconds[f'part.{phase}.{part}']:.6f}"
            yield {**fitted, "quantity": part, "payload_bytes": 8 * GIB // per_gpu, "value": value}


def sglang() -> Iterator[Row]:
    for r in source("sglang_2xH200.csv"):
        common: Row = {
            "kind": "measured", "use": "fit", "run": r["case"], "step": r["cycle"], "gpu": "h200", "ranks_per_gpu": 1,
            "world_size": 2, "layout": "tp2", "note": r["note"],
        }  # fmt: skip
        held = round(float(r["gib_per_gpu"]) * GIB) if r["gib_per_gpu"] else None
        if not r["seconds"]:
            yield {**common, "quantity": f"engine.{r['op']}", "value": held, "unit": "byte/gpu"}
            continue
        payload = 16_380_000_000 if r["op"] in ("update_weights", "flatten_serialize_gather") else held
        yield {
            **common,
            "quantity": f"engine.{r['op']}",
            "value": r["seconds"],
            "unit": "s",
            "payload_bytes": payload,
        }


def task23() -> Iterator[Row]:
    for r in source("task23_4xA6000_qwen3_4b_steps.csv"):
        baseline = r["variant"] == "baseline"
        common: Row = {
            "corpus": "task23-4xa6000", "kind": "reported", "use": "site" if baseline else "holdout", "unit": "s",
            "run": r["variant"], "step": r["step"], "warmup": r["warmup"] == "true", "gpu": "rtx-a6000",
            "ranks_per_gpu": 1, "world_size": 4, "layout": "tp2-dp2", "plan": "reload" if baseline else "keep-window",
        }  # fmt: skip
        columns = {
            "sleep": "sleep_s", "update_weights": "update_weights_s", "wake_up": "wake_up_s",
            "switch": "switch_total_s", "step": "step_time_s", "train_wait": "train_wait_s",
        }  # fmt: skip
        for quantity, column in columns.items():
            yield {**common, "quantity": quantity, "value": r[column]}
    names = {
        "sleep_time": ("sleep", "s", 1), "update_weights_time": ("update_weights", "s", 1),
        "wake_up_time": ("wake_up", "s", 1), "switch_total": ("switch", "s", 1), "step_time": ("step", "s", 1),
        "step_token_per_s": ("throughput.tokens", "token/s", 1),
        "step_resp_token_per_s": ("throughput.response_tokens", "token/s", 1),
        "actor_train_tokens": ("tokens.trained", "token", 1), "peak_gpu_memory": ("memory.peak", "byte/gpu", MIB),
        "paused_window_physical_memory_low": ("held_at_sync.low", "byte/gpu", GIB),
        "paused_window_physical_memory_high": ("held_at_sync.high", "byte/gpu", GIB),
    }  # fmt: skip
    for r in source("task23_8xH20_qwen3_30b_a3b.csv"):
        quantity, unit, scale = names[r["metric"]]
        for variant in ("baseline", "keepalive"):
            value = float(r[variant]) * scale
            yield {
                "corpus": "task23-8xh20", "kind": "reported", "use": "site" if variant == "baseline" else "holdout",
                "run": variant, "step": 0, "gpu": "h20", "ranks_per_gpu": 1, "world_size": 8, "unit": unit,
                "layout": "tp4-cp2-ep8", "plan": "reload" if variant == "baseline" else "keep-window",
                "nccl": "2.28.9", "quantity": quantity, "value": round(value) if scale > 1 else r[variant],
            }  # fmt: skip


def public() -> Iterator[Row]:
    for r in source("public_measurements.csv"):
        if not r["value"]:
            continue  # a pointer to another corpus, not a figure
        yield {
            "kind": "reported", "use": "context", "run": r["source"], "quantity": r["quantity"].replace(" ", "_"),
            "value": r["value"], "unit": r["unit"], "n": r["n"], "source": r["source"],
            "note": f"{r['hardware']}: {r['setting']}",
        }  # fmt: skip
    yield {
        "kind": "claimed", "use": "context", "run": "inclusionAI/asystem-amem", "quantity": "communicator.suspend",
        "value": 1.0, "unit": "s", "source": "inclusionAI/asystem-amem#11",
        "note": "advertised upper bound of a suspend plugin; the issue measured more than destroy and create",
    }  # fmt: skip


def all_rows() -> Iterator[Row]:
    parts = {
        "h200x2-communicators": communicators(), "h200x2-lifecycle": lifecycle(), "h200x2-memory-saver": memory_saver(),
        "h200x2-saver-sizes": saver_sizes(), "h200x2-switch-plans": switches("h200x2_switch_plans.csv"),
        "h200x2-lean-released": switches("h200x2_lean_released.csv"),
        "h200x2-runtime": runtime_switches(), "sglang-h200x2": sglang(), "": task23(),
        "public": public(),
    }  # fmt: skip
    counts: dict[str, int] = {}
    for corpus, rows in parts.items():
        for row in rows:
            name = str(row.setdefault("corpus", corpus))
            counts[name] = counts.get(name, 0) + 1
            row["warmup"] = "true" if row.get("warmup") else "false"
            yield {
                "id": f"{name}-{counts[name]:04d}",
                "n": 1,
                **{k: v for k, v in row.items() if v not in ("", None)},
            }


def main() -> int:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(all_rows())
    target = EVIDENCE / "rows.csv"
    if "--check" in sys.argv:
        return 0 if target.read_text() == text.getvalue() else 1
    target.write_text(text.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
