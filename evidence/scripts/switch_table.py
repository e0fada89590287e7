"""Print the switches of evidence/sources/switches as Markdown tables: seconds per plan, communicators, bandwidth.

python evidence/scripts/switch_table.py
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from pitstop.plan import NAMED_PLANS
from pitstop.units import MIB
from pitstop_simulator.evidence import Row, load_evidence


def main() -> None:
    seconds: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    kept: dict[tuple[str, str], Row] = {}
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in load_evidence().select(corpus="h200x2-runtime"):
        kind, _, what = row.quantity.partition(".")
        if row.quantity == "switch":
            seconds[row.layout][row.plan][row.run].append(row.value)
        elif kind == "memory":
            kept[row.layout, what.split("_")[0]] = row
        elif kind == "bandwidth":
            ratios[row.layout, what.split("_")[0]].append(row.value)
    print("Seconds of a whole switch: mean over runs (runs), and per cent of `reload`\n")
    print("| layout | " + " | ".join(NAMED_PLANS) + " |")
    print("|---" * (len(NAMED_PLANS) + 1) + "|")
    for layout, plans in sorted(seconds.items()):
        means = {
            plan: statistics.mean(statistics.mean(v) for v in runs.values()) for plan, runs in plans.items()
        }
        cells = [
            f"{means[plan]:.2f} ({len(plans[plan])}), {means[plan] / means['reload']:.1%}"
            for plan in NAMED_PLANS
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
            cells.append(f"{row.communicators}: {row.value / MIB:,.0f} MiB")
        cells += [" ".join(f"{ratio:.3f}" for ratio in ratios[layout, kind]) for kind in ("own", "shared")]
        print(f"| {layout} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
