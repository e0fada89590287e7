"""Gates on how the trainer works: the conditions of the report of task 23, section 3.2, as they generalise.

The report lists them as one chain of ``and``, for communicators kept alive. Its demand that pipeline, context and
expert parallelism be 1 is not among them: ``canary-coverage`` asks for what that demand stood for.
"""

from __future__ import annotations

from typing import Final

from pitstop.gates.facts import TORCH_MEMORY_SAVER, Facts
from pitstop.gates.gate import (
    Finding,
    Gate,
    found_closed,
    found_open,
    must_be,
    not_known,
    survives,
    survives_or_retains,
)

REPORT: Final = "report of task 23, section 3.2, redai-infra/Relax#230"
BACK = "Use reload."


def _role(facts: Facts) -> Finding:
    if facts.role is None:
        return not_known()
    if facts.role == "actor":
        return found_open("actor")
    return found_closed(facts.role, "Use reload for these ranks; only the actor hands weights over.")


def _saver(facts: Facts) -> Finding:
    if facts.saver_name is None:
        return not_known(remedy="Give versions.saver in the scenario; checked in the trainer.")
    if facts.saver_name == TORCH_MEMORY_SAVER:
        return found_open(TORCH_MEMORY_SAVER)
    return found_closed(f"saver: {facts.saver_name}", f"Offload with {TORCH_MEMORY_SAVER}, or use reload.")


def _weight_transfer(facts: Facts) -> Finding:
    if facts.weight_transfer is None:
        return not_known()
    if facts.weight_transfer == "ipc":
        return found_open("CUDA IPC on the same node")
    return found_closed(f"by {facts.weight_transfer}", "Hand weights over by CUDA IPC, or use reload.")


def _accelerator(facts: Facts) -> Finding:
    if facts.accelerator is None:
        return not_known()
    # The CPU with gloo has no device memory to lose: that is how the runtime's tests run.
    if facts.accelerator == "cuda" or (facts.accelerator == "cpu" and facts.backend == "gloo"):
        return found_open(facts.accelerator)
    return found_closed(facts.accelerator, "Use reload; keeping is known to work on CUDA devices only.")


TRAINER_GATES: Final = (
    Gate(
        "actor-role",
        "these ranks train the actor",
        "Other roles hand no weights over, so the moments at which groups are used again are not those of the plan.",
        REPORT,
        survives,
        _role,
    ),
    Gate(
        "colocated",
        "trainer and engine take turns on the same GPUs",
        "Without turns nothing is paused and handed over, and a kept communicator gains nothing.",
        REPORT,
        survives,
        must_be(
            True,
            lambda facts: facts.colocated,
            good="the same GPUs",
            bad="GPUs of its own",
            remedy="There is no switch to speed up: use reload, or no plan at all.",
        ),
    ),
    Gate(
        "offloads-trainer",
        "the trainer's memory is paused for the rollout",
        "If the trainer keeps its memory there is no pause to survive, and what communicators hold comes on top.",
        REPORT,
        survives,
        must_be(
            True,
            lambda facts: facts.offloads_trainer,
            good="paused",
            bad="stays on the device",
            remedy="Offload the trainer (slime, miles and Relax: --offload-train), or use reload.",
        ),
    ),
    Gate(
        "per-step-rollout",
        "training and rollout alternate",
        "In fully asynchronous training, collectives may run at any time, also in what the plan takes for the pause.",
        REPORT,
        survives,
        must_be(
            False,
            lambda facts: facts.fully_async,
            good="in turns",
            bad="fully asynchronous",
            remedy=BACK,
        ),
    ),
    Gate(
        "no-critic",
        "no critic shares the GPUs",
        "A critic is woken and paused at other moments than the actor, and its communicators are not in the plan.",
        REPORT,
        survives,
        must_be(
            False,
            lambda facts: facts.uses_critic,
            good="none",
            bad="a critic shares the GPUs",
            remedy="Use reload, or train without a critic (GRPO and its kind).",
        ),
    ),
    Gate(
        "saver",
        f"{TORCH_MEMORY_SAVER} pauses the memory",
        "That communicators outlive a pause rests on this saver leaving NCCL's own memory alone; other ways to "
        "offload were not tried. Only this saver can retain its backups.",
        f"{REPORT}; evidence/sources/h200x2_memory_saver.csv",
        survives_or_retains,
        _saver,
    ),
    Gate(
        "weights-backed-up",
        "weights have a backup to export from",
        "Weights are exported while their memory is paused; without a backup there is nothing left to export.",
        REPORT,
        survives,
        must_be(
            True,
            lambda facts: facts.weights_backed_up,
            good="backed up",
            bad="no backup",
            remedy="Turn the weights' backup on (slime, miles: leave --disable-weights-backuper out), or use reload.",
        ),
    ),
    Gate(
        "weight-transfer",
        "weights reach the engine by CUDA IPC on the node",
        "Other transports have communicators between trainer and engine, which the plan neither keeps nor checks.",
        REPORT,
        survives,
        _weight_transfer,
    ),
    Gate(
        "accelerator",
        "the device is a CUDA device",
        "What a pause does to communicators was observed on CUDA devices only; Kunlun (klx) is excluded by name.",
        REPORT,
        survives,
        _accelerator,
    ),
)
