"""Print the switches of evidence/sources/switches as Markdown tables: seconds per plan, communicators, bandwidth.

python evidence/scripts/switch_table.py
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path

PLANS = (
    "reload",
    "reload-deferred",
    "keep-window",
    "keep",
    "suspend",
    "lean",
    "lean-released",
    "lean-copies",
)
ROWS = Path(__file__).resolve().parent.parent / "rows.csv"
MIB = 1024**2


def main() -> None:
    seconds: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    kept: dict[tuple[str, str], dict[str, str]] = {}
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["corpus"] != "h200x2-runtime":
                continue
            if row["quantity"] == "switch":
                seconds[row["layout"]][row["plan"]][row["run"]].append(float(row["value"]))
            elif row["quantity"].startswith("memory."):
                kept[row["layout"], row["quantity"].removeprefix("memory.").split("_")[0]] = row
            elif row["quantity"].startswith("bandwidth."):
                ratios[row["layout"], row["quantity"].removeprefix("bandwidth.").split("_")[0]].append(
                    float(row["value"])
                )
    print("Seconds of a whole switch: mean over runs (runs), and per cent of `reload`\n")
    print("| layout | " + " | ".join(PLANS) + " |")
    print("|---" * (len(PLANS) + 1) + "|")
    for layout, plans in sorted(seconds.items()):
        means = {
            plan: statistics.mean(statistics.mean(v) for v in runs.values()) for plan, runs in plans.items()
        }
        cells = [
            f"{means[plan]:.2f} ({len(plans[plan])}), {means[plan] / means['reload']:.1%}" for plan in PLANS
        ]
        print(f"| {layout} | " + " | ".join(cells) + " |")
    print(
        "\nCommunicators of a rank while training, and bandwidth of all-reduces against torch's own groups\n"
    )
    print("| layout | own | shared | bandwidth, own | bandwidth, shared |")
    print("|---|---|---|---|---|")
    for layout in sorted(seconds):
        cells = []
        for kind in ("own", "shared"):
            row = kept[layout, kind]
            cells.append(f"{row['communicators']}: {float(row['value']) / MIB:,.0f} MiB")
        cells += [" ".join(f"{ratio:.3f}" for ratio in ratios[layout, kind]) for kind in ("own", "shared")]
        print(f"| {layout} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
