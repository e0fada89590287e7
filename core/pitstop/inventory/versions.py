"""Which rules of group creation a Megatron-core version follows.

Read from ``megatron/core/parallel_state.py``. The tests compare 0.16.1 and 0.19.2 group for group with the real
library; 0.14.0, 0.17.0 and 0.18.0 were compared in the same way once, on 150 layouts each. 0.13 to 0.17 make the same
groups. 0.18 moved the extra all-gather groups out of ``initialize_model_parallel``. 0.19 added generalized
tensor parallelism (``gtp_remat``) and three groups with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pitstop.errors import FieldProblem, InvalidScenarioError, show_value

DEFAULT_MEGATRON = "0.16"
_OLDEST = (0, 10)
_EXACT_FROM = (0, 13)
_NEWEST = (0, 19)
_VERSION = re.compile(r"^v?(\d+)\.(\d+)(?:[.\-+a-z].*)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MegatronRules:
    """How one range of Megatron-core versions makes its groups.

    ``version`` names the rules by their first release that is tested; ``note`` is set if the version asked
    for is not one that these rules were read from, and says which rules stand in for it.
    """

    version: str
    has_gtp: bool
    late_all_gather: bool
    note: str | None = None


def megatron_rules(version: str | None) -> MegatronRules:
    """Rules for a ``megatron-core`` version; ``None`` means the default, 0.16.

    Raises:
        InvalidScenarioError: not a version, or older than 0.10 (whose groups differ too much to stand in
            for).
    """
    if version is None:
        return MegatronRules("0.16", has_gtp=False, late_all_gather=False)
    match = _VERSION.match(version.strip())
    if match is None:
        raise _refused(version, "is not a version of megatron-core", "Write it as 0.16.1, or leave it out.")
    found = (int(match[1]), int(match[2]))
    if found < _OLDEST:
        raise _refused(
            version,
            "is too old: before 0.10 Megatron-core makes other groups",
            "Use 0.16 or newer (0.10 to 0.12 are approximated by the rules of 0.16).",
        )
    rules = "0.16" if found < (0, 18) else "0.18" if found < (0, 19) else "0.19"
    note = None
    if found < _EXACT_FROM or found > _NEWEST:
        note = f"megatron-core {version} is not known; the groups are those of {rules}"
    return MegatronRules(rules, has_gtp=rules == "0.19", late_all_gather=rules != "0.16", note=note)


def _refused(version: str, problem: str, remedy: str) -> InvalidScenarioError:
    return InvalidScenarioError(
        "unusable Megatron version", [FieldProblem("versions.megatron", show_value(version), problem, remedy)]
    )
