"""Documents that the tests send."""

from __future__ import annotations

import copy
from typing import Any

_SCENARIO: dict[str, Any] = {
    "schema_version": 1,
    "name": "h200x2-tp2",
    "hardware": {"gpu": "h200", "gpus_per_node": 2},
    "layout": {"tp": 2},
    "model": "qwen3-0.6b",
    "trainer": {"group_creation": "eager", "rollout_s": 10, "saved_bytes_per_rank": 8 * 2**30},
    "engine": {"name": "none"},
}
EVIDENCE = "sleep_s,update_weights_s,wake_up_s\n12.42,5.80,4.28\n12.11,6.10,4.19\n12.36,6.20,4.17\n"


def changed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with some values set, addressed by paths with ``__`` for dots."""
    result = copy.deepcopy(document)
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = result
        for parent in parents:
            target = target[parent]
        target[last] = value
    return result


def scenario(**changes: Any) -> dict[str, Any]:
    return changed(_SCENARIO, **changes)


def request(**changes: Any) -> dict[str, Any]:
    """A prediction that is computed quickly."""
    return changed({"scenario": _SCENARIO, "plans": ["reload", "lean"], "draws": 50}, **changes)


def manifest(**changes: Any) -> dict[str, Any]:
    plan = {"name": "reload", "training": "destroy", "cooldown": "fixed"}
    return changed({"scenario": _SCENARIO, "plan": plan, "warmup_steps": 1, "arm": "baseline"}, **changes)


def step(number: int, sleep: float = 8.0, **changes: Any) -> dict[str, Any]:
    document = {
        "step": number,
        "phases": {
            "sleep": {"total_s": sleep, "components_s": {"saver.pause": 3.5}},
            "update_weights": {"total_s": 5.0},
            "wake_up": {"total_s": 4.0},
        },
        "memory": {"held_at_sync_bytes": 1_047_527_424},
        "recorded_at": "2026-01-15T08:33:10Z",
    }
    return changed(document, **changes)
