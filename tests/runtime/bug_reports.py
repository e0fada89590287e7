"""Public reports of what goes wrong in a switch, by address: what was owed to a user, and which tests show it.

The sentences are ours; the addresses say where the facts are from. ``test_bug_reports`` checks that the tests exist.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE = "tests/runtime/test_bug_reports.py"
GATES = "tests/core/test_gates.py"
GROUPS = "tests/runtime/test_groups"
SAVER = "tests/runtime/test_saver.py"
BINARY = "tests/runtime/test_saver_binary.py"
MEASURE = "tests/runtime/test_measure.py"
FAILURES = "tests/runtime/test_rank_failures.py"


@dataclass(frozen=True)
class Report:
    """One report.

    ``shown_by`` are node ids without parameters. What a trainer's process cannot do anything about is not its side:
    that is the predictions' part.
    """

    kind: str
    owed: str
    shown_by: tuple[str, ...]
    trainers_side: bool = True


_NO_MEMORY_AT_WAKE_UP = Report(
    "a rebuild at wake-up found too little device memory",
    "the figures are compared before anything is resumed, and wake_up can be called again",
    (f"{HERE}::test_a_wake_up_without_room_does_nothing_and_can_be_repeated",),
)
_PORTS = Report(
    "groups destroyed and made again at once: ports still in use",
    "a cooldown, stated by the caller, between a destroy and the next rebuild under every plan",
    (
        f"{HERE}::test_ports_have_their_cooldown_before_a_rebuild",
        f"{HERE}::test_without_a_cooldown_ports_are_missed",
    ),
)

REPORTS: dict[str, Report] = {
    "THUDM/slime#2095": Report(
        "rebuilt groups had lost their time limit and options",
        "a rebuild with everything that the group was made with",
        (
            f"{GROUPS}_options.py::test_every_field_of_the_options_is_handed_on",
            f"{GROUPS}_options.py::test_a_time_limit_survives_rebuilds",
            f"{GROUPS}_options.py::test_a_rebuilt_communicator_keeps_to_the_time_limit",
            f"{GROUPS}_options.py::test_a_bound_device_survives_rebuilds",
            f"{GROUPS}_options.py::test_names_and_descriptions_survive_rebuilds",
        ),
    ),
    "radixark/miles#384": Report(
        "fast ranks issued a collective while slow ones were still rebuilding",
        "no rank leaves the rebuild before all have finished it",
        (
            f"{GROUPS}_meeting.py::test_no_rank_leaves_wake_up_before_all_have_restored",
            f"{GROUPS}_meeting.py::test_a_rebuild_waits_for_a_member_that_is_late",
            f"{GROUPS}_meeting.py::test_every_meeting_has_a_prefix_of_its_own",
        ),
    ),
    "radixark/miles#253": Report(
        "groups of a single rank broke under a wrapper",
        "they are torch's own and left alone; a gain of zero is predicted, and said",
        (
            f"{HERE}::test_on_one_rank_every_plan_switches_and_wraps_nothing",
            f"{GROUPS}_destroy.py::test_groups_of_one_rank_are_torchs_own",
            f"{GATES}::test_on_one_gpu_there_is_nothing_to_switch_except_backups",
            "tests/simulator/test_predict.py::test_a_single_rank_has_no_communicator_to_keep_and_is_told_so",
        ),
    ),
    "THUDM/slime#669": Report(
        "NCCL was out of memory while torch saw enough of it",
        "the driver's figure decides; an error names it beside the allocator's",
        (f"{SAVER}::test_headroom_error_names_the_allocators_share",),
    ),
    "fzyzcjy/torch_memory_saver#88": Report(
        "buffers that CUDA graphs had registered were stale after a pause",
        "no communicator is kept while NCCL_GRAPH_REGISTER may be on beside CUDA graphs",
        (f"{HERE}::test_graphs_with_registered_buffers_keep_no_communicator",),
    ),
    "NVIDIA/nccl#2337": Report(
        "a suspend leaves NVLS memory behind",
        "no suspend with NVLS, and a warning of plans that keep",
        (f"{GATES}::test_which_plans_a_fact_closes", f"{GATES}::test_nvls_warns_of_keeping"),
    ),
    "radixark/miles#806": Report(
        "a group kept over two nodes failed after the pause",
        "nothing is kept across nodes before a cross-node canary has passed",
        (f"{HERE}::test_across_nodes_a_group_is_kept_only_after_a_canary_there",),
    ),
    "THUDM/slime#909": Report(
        "destroying a group that was invalid already raised, and killed the actor",
        "a destroy can be repeated and never raises; a second owner of the groups is refused",
        (
            f"{HERE}::test_an_invalid_group_is_no_reason_to_end_a_run",
            f"{HERE}::test_groups_that_another_library_wraps_are_not_switched",
            f"{GROUPS}_destroy.py::test_releasing_building_and_aborting_twice_does_nothing_more",
            f"{GROUPS}_destroy.py::test_groups_without_a_live_communicator_are_destroyed_in_silence",
        ),
    ),
    "THUDM/slime#956": _NO_MEMORY_AT_WAKE_UP,
    "THUDM/slime#1086": _NO_MEMORY_AT_WAKE_UP,
    "THUDM/slime#2188": Report(
        "memory of the saver could not be exported by CUDA IPC in the weight sync",
        "one export is tried before the first switch, outside of the saver's memory",
        (
            f"{HERE}::test_an_export_that_ipc_refuses_is_found_before_the_first_switch",
            f"{HERE}::test_the_export_that_is_tried_is_not_of_the_savers_memory",
        ),
    ),
    "modelscope/ms-swift#9486": Report(
        "the first collective of a lazily made group stalled in full memory, past all time limits",
        "first collectives run inside the switch, with a time limit of their own",
        (
            f"{HERE}::test_first_collectives_are_over_before_training_fills_the_memory",
            f"{FAILURES}::test_one_rank_fails",
        ),
    ),
    "fzyzcjy/torch_memory_saver#99": Report(
        "the engine took the memory before the trainer had released it",
        "sleep ends when all ranks are out and the driver has the promised memory free",
        (
            f"{HERE}::test_no_rank_leaves_sleep_before_all_have_paused",
            f"{HERE}::test_memory_promised_to_the_engine_is_measured",
            f"{SAVER}::test_resume_without_room_is_refused_and_names_all_shares",
        ),
    ),
    "TideDra/lmm-r1#43": Report(
        "wake-up was out of memory because the caching allocator held on to freed memory",
        "the error names the allocator's share, and what empties it",
        (f"{SAVER}::test_headroom_error_names_the_allocators_share",),
    ),
    "fzyzcjy/torch_memory_saver#71": Report(
        "weights were damaged after a resume",
        "checksums of a sample of parameters, before and after each pause",
        (
            f"{HERE}::test_a_damaged_weight_ends_the_run_on_all_ranks",
            f"{SAVER}::test_checksum_notices_one_bit",
            f"{BINARY}::test_binary",
        ),
    ),
    "pytorch/pytorch#119196": _PORTS,
    "AMD-AGI/Primus#710": _PORTS,
    "NVIDIA-NeMo/Automodel#2686": Report(
        "a destroy hung until the DeepEP buffer was freed",
        "no plan that destroys while DeepEP or NVSHMEM is in the process, unless its buffer is stated to be freed",
        (f"{HERE}::test_with_deepep_loaded_nothing_is_destroyed",),
    ),
    "NVIDIA/Megatron-LM#6897": Report(
        "each cycle of destroy and rebuild leaked some twenty groups",
        "live communicators, sockets and threads are counted in each switch, and growth is an alarm",
        (
            f"{HERE}::test_twenty_switches_leave_nothing_behind",
            f"{HERE}::test_a_group_leaked_in_each_switch_is_an_alarm",
            f"{MEASURE}::test_growth_in_every_switch_is_an_alarm",
        ),
    ),
    "redai-infra/Relax#152": Report(
        "a checkpoint saved between sleep and the weight sync destroyed the kept groups",
        "an announced save is refused while asleep; one that is not announced ends in an error that says so",
        (
            f"{HERE}::test_a_save_while_asleep_is_refused_and_harms_nothing",
            f"{HERE}::test_groups_destroyed_behind_the_switch_are_a_failed_sync_and_no_crash",
            f"{GROUPS}_released.py::test_every_collective_without_a_communicator_fails_at_once",
        ),
    ),
    "NVIDIA/nccl#2363": Report(
        "a communicator of one rank took 512 MiB at its first collective",
        "singletons are part of the predicted memory",
        (),
        trainers_side=False,
    ),
    "vllm-project/vime#442": Report(
        "timers did not say where the time went",
        "a span for each component of each phase, under every plan",
        (
            f"{FAILURES}::test_every_component_of_every_plan_is_in_the_table",
            f"{MEASURE}::test_spans_add_up_by_component",
            f"{MEASURE}::test_a_record_has_the_slowest_rank_per_phase_and_component",
        ),
    ),
    "huggingface/trl#5312": Report(
        "weights were not updated, and nothing said so",
        "the engine's own word is compared with what was sent; without it a sync fails if that is required",
        (
            f"{HERE}::test_an_engine_that_kept_its_old_weights_is_found_out",
            f"{HERE}::test_a_sync_that_was_fast_is_no_sync_that_went_well",
        ),
    ),
    "inclusionAI/asystem-amem#11": Report(
        "a suspend that was advertised as fast was slower than destroying",
        "predictions rest on measured rows; a claim is shown as one and never fitted",
        ("tests/simulator/test_evidence.py::test_claims_are_never_fitted",),
        trainers_side=False,
    ),
}
