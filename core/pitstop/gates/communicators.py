"""Gates on what communicators can bear: a pause beside them, a suspend, a destroy, another wrapper.

What is said of NCCL's inside was read in release 2.30.7 (``src/mem_manager.cc``, ``src/include/alloc.h``,
``src/transport/nvls.cc``, ``docs/userguide/source/env.rst``).
"""

from __future__ import annotations

from typing import Final

from pitstop.gates.facts import (
    NCCL_GRAPH_REGISTER,
    NCCL_NVLS_ENABLE,
    NOBODY,
    REGISTER_ALL_TENSORS,
    Facts,
)
from pitstop.gates.gate import (
    Finding,
    Gate,
    any_plan,
    copies,
    destroys,
    found_closed,
    found_open,
    gains_by_groups_only,
    keeps,
    keeps_unchecked,
    must_be,
    not_known,
    number_of,
    registered_at_risk,
    survives,
    suspends,
)
from pitstop.gates.trainer import REPORT

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_COVERED_KINDS = ("tp", "dp", "pp", "cp", "ep")


def _canary_on(facts: Facts) -> Finding:
    if facts.single_rank_groups_only:
        return found_open("no communicator to check")
    return found_closed("the plan has canary: false", "Set canary: true in the plan.")


def _canary_coverage(facts: Facts) -> Finding:
    if facts.parallel_sizes is None:
        return not_known("layout not known")
    split = {kind: facts.parallel_sizes.get(kind, 1) for kind in _COVERED_KINDS}
    layout = " ".join(f"{kind}{size}" for kind, size in split.items() if size > 1) or "one rank"
    if facts.canary_covers is None:
        return found_open(f"{layout}: Pitstop's canary checks every kept communicator")
    missing = [kind for kind, size in split.items() if size > 1 and kind not in facts.canary_covers]
    if missing:
        remedy = f"Let the canary run on the {', '.join(missing)} groups too, or use reload."
        return found_closed(f"{layout}: not checked: {', '.join(missing)}", remedy)
    return found_open(f"{layout}: all checked")


def _cross_node(facts: Facts) -> Finding:
    if facts.nodes is None:
        return not_known("number of nodes not known")
    if facts.nodes == 1:
        return found_open("one node")
    if facts.cross_node_canary_passed is None:
        remedy = "Refused until a cross-node canary has passed on this hardware and NCCL; run it once."
        return not_known(f"{facts.nodes} nodes, no cross-node canary run yet", remedy)
    if facts.cross_node_canary_passed:
        return found_open(f"{facts.nodes} nodes, cross-node canary passed")
    return found_closed(
        f"{facts.nodes} nodes, cross-node canary failed", "Use reload on this hardware and NCCL."
    )


def _copies_one_node(facts: Facts) -> Finding:
    if facts.nodes is None:
        return not_known("number of nodes not known")
    if facts.nodes == 1:
        return found_open("one node")
    remedy = "Use lean-released, whose weights are gathered over communicators."
    return found_closed(f"{facts.nodes} nodes", remedy)


def nvls_in_use(facts: Facts) -> bool | None:
    """Whether NCCL allocates NVLS memory; None: not known. Several ranks on a GPU turn NVLS off silently."""
    environment = facts.environment
    switched_off = environment is not None and number_of(environment.get(NCCL_NVLS_ENABLE), 2) == 0
    one_rank = facts.single_rank_groups_only or facts.world_size == 1
    shared_gpu = facts.ranks_per_gpu is not None and facts.ranks_per_gpu > 1
    if (
        switched_off
        or one_rank
        or shared_gpu
        or facts.nvls_supported_by_gpu is False
        or facts.backend == "gloo"
    ):
        return False
    return None if environment is None or facts.nvls_supported_by_gpu is None else True


def _nvls(remedy: str, facts: Facts) -> Finding:
    used = nvls_in_use(facts)
    if used is None:
        return not_known(
            f"the GPU can do it; {NCCL_NVLS_ENABLE}?" if facts.nvls_supported_by_gpu else "GPU?",
            f"Start with {NCCL_NVLS_ENABLE}=0.",
        )
    return found_closed("NVLS is on", remedy) if used else found_open("no NVLS")


def _nvls_suspend(facts: Facts) -> Finding:
    return _nvls(f"Start with {NCCL_NVLS_ENABLE}=0, or use a plan that destroys or keeps.", facts)


def _nvls_held(facts: Facts) -> Finding:
    return _nvls(f"Start with {NCCL_NVLS_ENABLE}=0 if that memory is missed in the rollout.", facts)


def _graph_register(facts: Facts) -> Finding:
    environment = facts.environment
    if facts.uses_cuda_graphs is False or facts.backend == "gloo":
        return found_open("no CUDA graphs with collectives")
    if environment is not None and number_of(environment.get(NCCL_GRAPH_REGISTER), 1) == 0:
        return found_open(f"{NCCL_GRAPH_REGISTER}=0")
    remedy = (
        f"Set {NCCL_GRAPH_REGISTER}=0 before graphs are captured, or keep the buffers that NCCL gets outside "
        "the saver's regions."
    )
    if facts.uses_cuda_graphs is None or environment is None:
        return not_known(remedy=remedy)
    return found_closed(f"CUDA graphs, {NCCL_GRAPH_REGISTER} is on", remedy)


def _tensors_registered(facts: Facts) -> Finding:
    if facts.backend == "gloo":
        return found_open("gloo registers nothing")
    if facts.environment is None:
        return not_known()
    if facts.environment.get(REGISTER_ALL_TENSORS, "").strip().lower() in _TRUE:
        return found_closed(f"{REGISTER_ALL_TENSORS} is on", f"Unset {REGISTER_ALL_TENSORS}, or use reload.")
    return found_open("not set")


def _deepep(facts: Facts) -> Finding:
    libraries = {"DeepEP buffer": facts.deepep_loaded, "NVSHMEM memory": facts.nvshmem_loaded}
    alive = [name for name, loaded in libraries.items() if loaded]
    if alive:
        remedy = (
            "Free it before groups are released (DeepEP: explicitly_destroy=True and Buffer.destroy()), make it again "
            "after, and state that it is not alive then: Facts(deepep_loaded=False, nvshmem_loaded=False). A plan that "
            "destroys nothing (keep, lean) helps only until it falls back to reload."
        )
        return found_closed(f"alive: {', '.join(alive)}", remedy)
    return not_known() if None in libraries.values() else found_open("neither is alive")


def _double_wrapped(facts: Facts) -> Finding:
    if facts.double_wrapped_by is None:
        return not_known()
    if facts.double_wrapped_by == NOBODY:
        return found_open("nobody else wraps the groups")
    remedy = f"Switch the group wrapping of {facts.double_wrapped_by} off, before Megatron is imported."
    return found_closed(f"wrapped by {facts.double_wrapped_by}", remedy)


COMMUNICATOR_GATES: Final = (
    Gate(
        "canary-on",
        "kept communicators are checked after the pause",
        "Whether a communicator outlives a pause differs by hardware and NCCL; unchecked, it shows as a hang or as "
        "wrong gradients.",
        REPORT,
        keeps_unchecked,
        _canary_on,
    ),
    Gate(
        "canary-coverage",
        "the canary checks every kind of group that the layout has",
        "The report kept groups under TP and DP only, since its canary checked no others. With one that checks all "
        "of them, PP, CP and EP are no reason to refuse.",
        REPORT,
        survives,
        _canary_coverage,
    ),
    Gate(
        "cross-node",
        "kept communicators between nodes are known to work here",
        "On two GB200 nodes (NCCL 2.27.5) communicators failed after pause and resume with 'Bad address', while one "
        "node was fine. There, communicators destroyed and built anew failed as well: reload may not help.",
        "radixark/miles#806",
        survives,
        _cross_node,
    ),
    Gate(
        "copies-one-node",
        "ranks that copy weights from each other are on one node",
        "The copies read from buffers that another process has made (CUDA IPC), which ends at the node. Whether the "
        "processes see each other's GPUs is looked at when the manager is made.",
        "CUDA programming guide, interprocess communication",
        copies,
        _copies_one_node,
    ),
    Gate(
        "nvls-suspend",
        "no NVLS memory that a suspend leaves behind",
        "NCCL counts NVLS memory as persistent: a suspend does not release it, and the memory saved falls short.",
        "NVIDIA/nccl#2337; src/transport/nvls.cc of NCCL 2.30.7; whether a later release changes it is not known",
        suspends,
        _nvls_suspend,
    ),
    Gate(
        "nvls-held",
        "no NVLS memory held through the pause",
        "Kept communicators hold their NVLS memory too. The evidence was measured with NVLS off, so that predicted "
        "memory leaves it out.",
        "NVIDIA/nccl#2337; that the evidence had NVLS off is by the word of those who measured it",
        keeps,
        _nvls_held,
        required=False,
        refuses=False,
    ),
    Gate(
        "split-share",
        "communicators do not share resources (splitShare)",
        "NCCL refuses to suspend a communicator whose resources are shared.",
        "src/mem_manager.cc of NCCL 2.30.7",
        suspends,
        must_be(
            False,
            lambda facts: facts.split_share_communicators,
            good="none shared",
            bad="split with shared resources",
            remedy="Leave splitShare (split_share) off in the communicators' configuration, or use lean.",
        ),
    ),
    Gate(
        "nccl-graph-register",
        "CUDA graphs hold no registration of paused buffers",
        "A pause keeps addresses and replaces the memory behind them. NCCL still has the old memory registered for "
        "the graph, and the replay hangs.",
        "fzyzcjy/torch_memory_saver#88, seen on two GB200 nodes",
        survives,
        _graph_register,
    ),
    Gate(
        "tensors-registered",
        "torch registers no tensors with NCCL",
        "With this variable torch registers all of the allocator's memory with each communicator; after a pause the "
        "registrations are stale, as with CUDA graphs.",
        "inferred from fzyzcjy/torch_memory_saver#88 and pytorch/pytorch#150682; no report of it is known",
        registered_at_risk,
        _tensors_registered,
    ),
    Gate(
        "deepep",
        "no DeepEP or NVSHMEM memory is alive when groups are destroyed",
        "Destroying groups hung until the DeepEP buffer (NVSHMEM memory and communicators of its own) was freed. "
        "The report's second run destroyed groups with DeepEP in use, and no hang is reported.",
        "NVIDIA-NeMo/Automodel#2686; which versions hang is not known",
        destroys,
        _deepep,
    ),
    Gate(
        "double-wrapping",
        "no other library wraps the trainer's groups",
        "slime, miles and frameworks after them replace torch.distributed.new_group by wrappers that destroy and "
        "reload. With two owners, one uses what the other has destroyed.",
        "reloadable_process_group.py of THUDM/slime and radixark/miles; see THUDM/slime#909",
        any_plan,
        _double_wrapped,
    ),
    Gate(
        "nothing-to-switch",
        "there are groups of more than one rank",
        "Groups of one rank are left alone, so that there is nothing to keep: the predicted gain is zero.",
        "radixark/miles#253",
        gains_by_groups_only,
        must_be(
            False,
            lambda facts: facts.single_rank_groups_only,
            good="some have more",
            bad="nothing to switch: every group has one rank",
            remedy="Use reload, or lean, which still gains by retaining the host backups.",
        ),
        required=False,
        refuses=False,
    ),
)
