"""Gates: each open and closed on facts that decide it, doubt, the baseline, and the command."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pitstop.cli.app import build_app, run
from pitstop.gates import (
    GATES,
    GATES_BY_CODE,
    NO_SAVER,
    NOBODY,
    TORCH_MEMORY_SAVER,
    Facts,
    GateVerdict,
    Verdict,
    evaluate,
    facts_of,
    judge,
    relevant_environment,
)
from pitstop.gates.gate import release_of
from pitstop.loading import load_scenario
from pitstop.plan import BASELINE, NAMED_PLANS, Disposition, Export, Plan
from pitstop.units import GIB

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
RELOADS = {"reload", "reload-deferred"}
SIZES = {"tp": 4, "pp": 2, "cp": 2, "ep": 8, "dp": 1}

# A trainer in which every plan may be carried out.
GOOD = Facts(
    world_size=8,
    nodes=1,
    ranks_per_gpu=1,
    gpu="h200",
    accelerator="cuda",
    nvls_supported_by_gpu=True,
    single_rank_groups_only=False,
    parallel_sizes=SIZES,
    torch="2.13.0+cu130",
    nccl="2.30.7",
    saver="0.0.10",
    megatron="0.19.2",
    driver="580.159.04",
    backend="nccl",
    environment={"NCCL_NVLS_ENABLE": "0"},
    saver_name=TORCH_MEMORY_SAVER,
    saver_preloaded=True,
    double_wrapped_by=NOBODY,
    deepep_loaded=False,
    nvshmem_loaded=False,
    uses_cuda_graphs=False,
    split_share_communicators=False,
    role="actor",
    colocated=True,
    offloads_trainer=True,
    fully_async=False,
    uses_critic=False,
    weights_backed_up=True,
    weight_transfer="ipc",
    cross_node_canary_passed=None,
    driver_free_bytes=20 * GIB,
    needed_bytes=12 * GIB,
    host_available_bytes=500 * GIB,
    host_backup_bytes=90 * GIB,
)


def environment(**changes: str) -> dict[str, Any]:
    return {"environment": {"NCCL_NVLS_ENABLE": "0"} | changes}


OPEN: list[tuple[str, dict[str, Any]]] = [
    *((gate.code, {}) for gate in GATES if gate.code != "canary-on"),
    ("accelerator", {"accelerator": "cpu", "backend": "gloo"}),
    ("torch-range", {"torch": "2.11.0"}),
    ("torch-range", {"torch": "2.14.1+cu130"}),
    ("suspend-support", {"nccl": "2.29.7", "torch": "2.11.0"}),
    ("suspend-memory", environment(NCCL_CUMEM_ENABLE="1")),
    ("saver-version", {"saver": "0.1.0"}),
    ("saver-hooked", {"saver_name": NO_SAVER, "saver_preloaded": False}),
    (
        "expandable-segments",
        environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False,max_split_size_mb:64"),
    ),
    (
        "expandable-segments",
        {"saver_name": NO_SAVER} | environment(PYTORCH_ALLOC_CONF="expandable_segments:True"),
    ),
    ("ranks-per-gpu", {"ranks_per_gpu": 2} | environment(NCCL_MULTI_RANK_GPU_ENABLE="1")),
    ("ranks-per-gpu", {"ranks_per_gpu": 2, "backend": "gloo"}),
    ("canary-on", {"single_rank_groups_only": True}),
    ("canary-coverage", {"canary_covers": frozenset({"tp", "pp", "cp", "ep"})}),  # dp is 1
    ("cross-node", {"nodes": 8, "cross_node_canary_passed": True}),
    ("nvls-suspend", {"nvls_supported_by_gpu": False, "environment": None}),
    ("nvls-suspend", {"ranks_per_gpu": 2, "environment": {}}),  # NCCL then turns NVLS off by itself
    ("nvls-held", {"backend": "gloo", "environment": {}}),
    ("nccl-graph-register", {"uses_cuda_graphs": True} | environment(NCCL_GRAPH_REGISTER="0")),
    ("nccl-graph-register", {"uses_cuda_graphs": None} | environment(NCCL_GRAPH_REGISTER="0")),
    ("tensors-registered", environment(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="0")),
    ("tensors-registered", {"backend": "gloo", "environment": None}),
    ("headroom", {"needed_bytes": 20 * GIB}),
]

# Code, facts that close it, what the value says, what the remedy says.
CLOSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("actor-role", {"role": "critic"}, "critic", "reload"),
    ("colocated", {"colocated": False}, "GPUs of its own", "no switch"),
    ("offloads-trainer", {"offloads_trainer": False}, "stays on the device", "--offload-train"),
    ("per-step-rollout", {"fully_async": True}, "asynchronous", "reload"),
    ("no-critic", {"uses_critic": True}, "critic", "reload"),
    ("saver", {"saver_name": NO_SAVER}, "none", TORCH_MEMORY_SAVER),
    ("weights-backed-up", {"weights_backed_up": False}, "no backup", "--disable-weights-backuper"),
    ("weight-transfer", {"weight_transfer": "nccl"}, "by nccl", "CUDA IPC"),
    ("accelerator", {"accelerator": "klx"}, "klx", "CUDA"),
    ("accelerator", {"accelerator": "rocm"}, "rocm", "CUDA"),
    ("torch-range", {"torch": "2.10.1"}, "2.10.1", "2.11 to 2.14"),
    ("torch-range", {"torch": "2.15.0a0+git1234"}, "2.15.0a0", "2.11 to 2.14"),
    ("suspend-support", {"nccl": "2.28.9"}, "2.28.9", "2.29.7"),
    ("suspend-support", {"nccl": "2.29.3", "torch": "2.13.0"}, "2.29.3", "loaded, not what is installed"),
    ("suspend-support", {"backend": "gloo"}, "gloo", "keep or reload"),
    ("suspend-memory", environment(NCCL_CUMEM_ENABLE="0"), "NCCL_CUMEM_ENABLE=0", "Unset"),
    ("suspend-memory", environment(NCCL_DISABLE_MEM_MANAGER="1"), "NCCL_DISABLE_MEM_MANAGER", "Unset"),
    ("saver-version", {"saver": "0.0.9"}, "0.0.9", "0.0.10"),
    ("saver-version", {"saver": "0.0.9.post1"}, "0.0.9.post1", "0.0.10"),
    ("saver-hooked", {"saver_preloaded": False}, "not in the process", "LD_PRELOAD"),
    (
        "expandable-segments",
        environment(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64, expandable_segments:True"),
        "PYTORCH_CUDA_ALLOC_CONF",
        "Take expandable_segments out",
    ),
    (
        "expandable-segments",
        environment(PYTORCH_ALLOC_CONF="expandable_segments:true"),
        "PYTORCH_ALLOC_CONF",
        "Take",
    ),
    ("ranks-per-gpu", {"ranks_per_gpu": 2, "nccl": "2.29.7"}, "NCCL 2.29.7", "2.30"),
    ("ranks-per-gpu", {"ranks_per_gpu": 2}, "NCCL_MULTI_RANK_GPU_ENABLE is off", "=1"),
    (
        "ranks-per-gpu",
        {"ranks_per_gpu": 2} | environment(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="1"),
        "NCCL_NVLS_ENABLE=1",
        "NCCL_NVLS_ENABLE=0",
    ),
    ("canary-on", {}, "canary: false", "canary: true"),
    ("canary-coverage", {"canary_covers": frozenset({"tp", "dp"})}, "not checked: pp, cp, ep", "ep groups"),
    ("cross-node", {"nodes": 2, "cross_node_canary_passed": False}, "2 nodes", "reload"),
    ("copies-one-node", {"nodes": 2}, "2 nodes", "lean-released"),
    ("nvls-suspend", {"environment": {}}, "NVLS is on", "NCCL_NVLS_ENABLE=0"),
    ("nvls-suspend", {"environment": {"NCCL_NVLS_ENABLE": "2"}}, "NVLS is on", "NCCL_NVLS_ENABLE=0"),
    ("nvls-held", {"environment": {}}, "NVLS is on", "NCCL_NVLS_ENABLE=0"),
    ("split-share", {"split_share_communicators": True}, "shared", "splitShare"),
    ("nccl-graph-register", {"uses_cuda_graphs": True}, "is on", "NCCL_GRAPH_REGISTER=0"),
    (
        "nccl-graph-register",
        {"uses_cuda_graphs": True} | environment(NCCL_GRAPH_REGISTER="1"),
        "is on",
        "before graphs are captured",
    ),
    (
        "tensors-registered",
        environment(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="TRUE"),
        "is on",
        "Unset",
    ),
    ("deepep", {"deepep_loaded": True}, "DeepEP buffer", "Buffer.destroy()"),
    ("deepep", {"nvshmem_loaded": True, "deepep_loaded": None}, "NVSHMEM", "destroys nothing"),
    ("double-wrapping", {"double_wrapped_by": "slime"}, "slime", "slime"),
    ("nothing-to-switch", {"single_rank_groups_only": True}, "nothing to switch", "reload"),
    ("headroom", {"driver_free_bytes": 3 * GIB}, "needed 12.00 GiB, free 3.00 GiB", "mem_fraction_static"),
    ("host-memory", {"host_available_bytes": 64 * GIB}, "needed 90.00 GiB, free 64.00 GiB", "reallocate"),
]

# Facts without which a gate cannot say anything.
UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    *(
        (gate.code, {field.name: None for field in fields(Facts)})
        for gate in GATES
        if gate.code != "canary-on"
    ),
    ("torch-range", {"torch": "nightly"}),
    ("suspend-support", {"nccl": "unknown"}),
    ("ranks-per-gpu", {"ranks_per_gpu": 2, "environment": None}),
    ("ranks-per-gpu", {"ranks_per_gpu": 2, "nccl": None} | environment(NCCL_MULTI_RANK_GPU_ENABLE="1")),
    ("cross-node", {"nodes": 2}),
    ("copies-one-node", {"nodes": None}),
    ("nvls-suspend", {"environment": None}),
    ("nvls-suspend", {"environment": {}, "nvls_supported_by_gpu": None}),
    ("nccl-graph-register", {"uses_cuda_graphs": None}),
    ("nccl-graph-register", {"uses_cuda_graphs": True, "environment": None}),
    ("deepep", {"nvshmem_loaded": None}),
    ("headroom", {"needed_bytes": None}),
    ("headroom", {"driver_free_bytes": None}),
]

REPORT_ROWS = [
    "redai-infra/Relax#230",
    "NVIDIA/nccl#2337",
    "fzyzcjy/torch_memory_saver#88",
    "fzyzcjy/torch_memory_saver#71",
    "NVIDIA-NeMo/Automodel#2686",
    "radixark/miles#806",
    "radixark/miles#253",
    "THUDM/slime#669",
    "THUDM/slime#909",
    "THUDM/slime#956",
    "THUDM/slime#1086",
    "modelscope/ms-swift#9486",
]


@pytest.mark.parametrize(("code", "changes"), OPEN)
def test_open(code: str, changes: dict[str, Any]) -> None:
    finding = GATES_BY_CODE[code].check(replace(GOOD, **changes))
    assert finding.verdict is GateVerdict.OPEN
    assert finding.value
    assert finding.remedy == ""


@pytest.mark.parametrize(("code", "changes", "value", "remedy"), CLOSED)
def test_closed_says_what_was_seen_and_what_to_do(
    code: str, changes: dict[str, Any], value: str, remedy: str
) -> None:
    finding = GATES_BY_CODE[code].check(replace(GOOD, **changes))
    assert finding.verdict is GateVerdict.CLOSED
    assert value in finding.value
    assert remedy in finding.remedy


@pytest.mark.parametrize(("code", "changes"), UNKNOWN)
def test_unknown(code: str, changes: dict[str, Any]) -> None:
    finding = GATES_BY_CODE[code].check(replace(GOOD, **changes))
    assert finding.verdict is GateVerdict.UNKNOWN
    assert finding.value
    assert finding.remedy


def test_every_gate_has_an_open_and_a_closed_case() -> None:
    codes = {gate.code for gate in GATES}
    assert len(codes) == len(GATES)
    assert {code for code, _ in OPEN} == codes
    assert {code for code, *_ in CLOSED} == codes


@pytest.mark.parametrize("address", REPORT_ROWS)
def test_every_gated_report_is_a_source(address: str) -> None:
    assert any(address in gate.source for gate in GATES)


def test_every_gate_says_what_goes_wrong_and_guards_some_plan() -> None:
    unchecked = Plan(name="unchecked", training=Disposition.KEEP)
    for gate in GATES:
        assert gate.code == gate.code.lower().replace(" ", "-")
        assert gate.why.endswith(".")
        assert gate.source
        assert not gate.title.endswith(".")
        assert any(gate.applies(plan) for plan in (*NAMED_PLANS.values(), unchecked)), gate.code


@pytest.mark.parametrize("plan", NAMED_PLANS.values(), ids=list(NAMED_PLANS))
def test_every_plan_is_allowed_where_all_gates_are_open(plan: Plan) -> None:
    verdict = judge(plan, GOOD, live=True)
    assert verdict.allowed
    assert verdict.unknown == verdict.warned == ()
    assert str(verdict) == f"{plan.name} may be carried out here"


@pytest.mark.parametrize("plan", NAMED_PLANS.values(), ids=list(NAMED_PLANS))
def test_doubt_ends_in_the_baseline(plan: Plan) -> None:
    assert judge(plan, Facts()).allowed, "offline, what is not known is left to the trainer"
    assert judge(plan, Facts(), live=True).allowed == (plan.name in RELOADS)


@pytest.mark.parametrize(
    "gate", [gate for gate in GATES if gate.code != "canary-on"], ids=lambda gate: gate.code
)
def test_a_required_gate_that_is_not_known_refuses_in_a_trainer_only(gate: Any) -> None:
    plan = next(plan for plan in NAMED_PLANS.values() if gate.applies(plan) and plan.name not in RELOADS)
    unknown = next(changes for code, changes in UNKNOWN if code == gate.code)
    facts = replace(GOOD, **unknown)
    assert gate.code in {result.code for result in judge(plan, facts).unknown}
    assert judge(plan, facts).allowed
    blocking = {result.code for result in judge(plan, facts, live=True).blocking}
    assert (gate.code in blocking) == gate.required


def closed_for(facts: Facts) -> dict[str, set[str]]:
    """Codes of closed gates, warnings apart, by plan; plans without are left out."""
    verdicts = (judge(plan, facts) for plan in NAMED_PLANS.values())
    return {v.plan.name: {r.code for r in v.closed} for v in verdicts if v.closed}


@pytest.mark.parametrize(
    ("changes", "plans"),
    [
        ({"nccl": "2.28.9"}, {"suspend"}),
        ({"environment": {}}, {"suspend"}),  # NVLS: refuses a suspend, and only warns of keeping
        ({"deepep_loaded": True}, RELOADS | {"keep-window", "lean-released", "lean-copies"}),
        ({"nodes": 2, "cross_node_canary_passed": False}, set(NAMED_PLANS) - RELOADS),
        ({"host_available_bytes": 0}, {"lean", "lean-released", "lean-copies"}),
        ({"saver": "0.0.9"}, set(NAMED_PLANS) - RELOADS),
        ({"uses_critic": True}, set(NAMED_PLANS) - RELOADS - {"lean-copies"}),
        ({"double_wrapped_by": "miles"}, set(NAMED_PLANS)),
        ({"single_rank_groups_only": True}, set()),
        (environment(NCCL_CUMEM_ENABLE="0"), {"suspend"}),
        ({"torch": "2.10.0"}, set(NAMED_PLANS) - RELOADS),
    ],
)
def test_which_plans_a_fact_closes(changes: dict[str, Any], plans: set[str]) -> None:
    assert set(closed_for(replace(GOOD, **changes))) == plans


def test_nvls_warns_of_keeping() -> None:
    verdict = judge(NAMED_PLANS["keep"], replace(GOOD, environment={}), live=True)
    assert verdict.allowed
    assert [result.code for result in verdict.warned] == ["nvls-held"]


def test_on_one_gpu_there_is_nothing_to_switch_except_backups() -> None:
    facts = replace(GOOD, world_size=1, single_rank_groups_only=True)
    warned = {name for name, plan in NAMED_PLANS.items() if judge(plan, facts).warned}
    assert warned == {"keep-window", "keep", "suspend"}


def test_a_plan_that_keeps_without_canary_is_refused() -> None:
    for plan in (
        Plan(name="mine", training=Disposition.KEEP),
        Plan(name="mine", training=Disposition.DESTROY, export=Export.COMMUNICATOR),
    ):
        assert [result.code for result in judge(plan, GOOD).closed] == ["canary-on"]
    assert "canary-on" not in {result.code for result in evaluate(BASELINE, GOOD)}


def test_wide_layouts_are_not_refused_wholesale() -> None:
    verdict = judge(
        NAMED_PLANS["keep"], replace(GOOD, parallel_sizes={"pp": 16, "cp": 4, "ep": 32}), live=True
    )
    assert verdict.allowed


def test_the_message_names_every_gate_in_the_way() -> None:
    facts = replace(GOOD, nodes=2, role="critic", driver_free_bytes=0)
    text = str(judge(NAMED_PLANS["keep"], facts, live=True))
    assert text.startswith("keep may not be carried out here\n")
    assert "actor-role (closed): critic." in text
    assert "cross-node (unknown): 2 nodes, no cross-node canary run yet. Refused until" in text
    assert "radixark/miles#806" in text
    assert "needed 12.00 GiB, free 0.00 GiB" in text
    assert "cross-node" not in str(judge(NAMED_PLANS["keep"], facts))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_facts_of_a_scenario_state_what_it_states_and_no_more(path: Path) -> None:
    scenario = load_scenario(path)
    facts = facts_of(scenario)
    assert (facts.world_size, facts.nodes) == (scenario.world_size, scenario.hardware.nodes)
    assert facts.nccl == scenario.versions.nccl
    assert facts.host_backup_bytes is not None
    assert facts.host_backup_bytes > 0
    assert facts.nvls_supported_by_gpu is (scenario.hardware.gpu != "rtx-a6000")
    for name in ("environment", "role", "deepep_loaded", "uses_cuda_graphs", "offloads_trainer"):
        assert getattr(facts, name) is None
    for plan in (NAMED_PLANS[name] for name in RELOADS):
        assert judge(plan, facts, live=True).allowed


def test_facts_are_those_of_the_whole_node() -> None:
    facts = facts_of(load_scenario(next(path for path in EXAMPLES if path.stem == "h200x2-tp2")))
    assert facts.host_backup_bytes == 16 * GIB
    assert facts.parallel_sizes == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 1}
    assert facts.saver_name == TORCH_MEMORY_SAVER
    assert facts.colocated is None, "the scenario has no engine"


def test_only_relevant_variables_are_read() -> None:
    environ = {
        "HOME": "/root",
        "SECRET_TOKEN": "x",
        "NCCL_DEBUG": "INFO",
        "NCCL_NVLS_ENABLE": "0",
        "PYTORCH_ALLOC_CONF": "a:b",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }
    assert set(relevant_environment(environ)) == {
        "NCCL_NVLS_ENABLE",
        "PYTORCH_ALLOC_CONF",
        "TORCH_NCCL_BLOCKING_WAIT",
    }


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("2.29.7-1", (2, 29, 7)),
        ("v0.0.10rc1", (0, 0, 10)),
        (" 2.30 ", (2, 30)),
        ("main", None),
        ("", None),
        (None, None),
    ],
)
def test_releases(text: str | None, release: tuple[int, ...] | None) -> None:
    assert release_of(text) == release


H20 = next(path for path in EXAMPLES if path.stem == "relax-8xh20-qwen3-30b-a3b")


def gates(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run(build_app, ["gates", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_summary_fits_and_names_every_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = gates(capsys, str(path))
    assert err == ""
    assert all(f" {name} " in out for name in NAMED_PLANS)
    assert max(map(len, out.splitlines())) <= 100
    assert "To be checked in the trainer" in out
    assert "double-wrapping" in out


@pytest.mark.usefixtures("wide")
def test_summary_shows_what_is_closed_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = gates(capsys, str(H20))
    (row,) = [line for line in out.splitlines() if line.startswith(" suspend ")]
    assert row.split()[:3] == ["suspend", "no", "suspend-support"]
    (row,) = [line for line in out.splitlines() if line.startswith(" reload ")]
    assert "unless a check fails" in row
    assert "Load NCCL 2.29.7 or newer" in out


@pytest.mark.usefixtures("wide")
def test_a_named_plan_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = gates(capsys, str(H20), "--plan", "suspend")
    order = [out.index(f" {code} ") for code in ("suspend-support", "actor-role", "accelerator")]
    assert all(f" {gate.code} " in out for gate in GATES if gate.applies(NAMED_PLANS["suspend"]))
    assert order == sorted(order), "what is in the way comes first, then what is to be checked"
    assert "Remedy: Load NCCL" in out
    assert "NVIDIA/nccl#2337" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = gates(capsys, str(H20), "--json")
    document = json.loads(out)
    assert set(document) == {"scenario", "live", "facts", "plans"}
    assert document["facts"]["nccl"] == "2.28.9"
    assert document["facts"]["environment"] is None
    by_plan = {plan["plan"]: plan for plan in document["plans"]}
    assert list(by_plan) == list(NAMED_PLANS)
    assert by_plan["suspend"]["allowed"] is False
    assert by_plan["suspend"]["closed"] == ["suspend-support"]
    assert by_plan["keep"]["allowed"] is True
    assert "actor-role" in by_plan["keep"]["unknown"]
    (gate,) = [gate for gate in by_plan["suspend"]["gates"] if gate["code"] == "suspend-support"]
    assert set(gate) == {
        "code", "title", "verdict", "value", "why", "source", "remedy", "required", "refuses",
    }  # fmt: skip
    assert (gate["verdict"], gate["value"]) == ("closed", "NCCL 2.28.9")


def test_a_plan_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntraining: keep\nbackup: retain\n")
    out, _ = gates(capsys, str(H20), "--plan", str(path), "--json")
    (plan,) = json.loads(out)["plans"]
    assert plan["plan"] == "mine"
    assert plan["closed"] == ["canary-on"]
    assert "host-memory" in plan["unknown"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("leen", "Did you mean lean?"),
        ("leen", "Or give a plan's file."),
        ("./nowhere", "cannot be read"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_an_unknown_plan(plan: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = gates(capsys, str(H20), "--plan", plan, code=2)
    assert out == ""
    assert err.startswith("Invalid plan:")
    assert said in err


def test_a_bad_plan_file_names_field_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: mine\ntraining: burn\n")
    _, err = gates(capsys, str(H20), "--plan", str(path), code=2)
    assert "Invalid plan:" in err
    assert "training" in err
    assert "'destroy-after-sync'" in err


@pytest.mark.usefixtures("wide")
def test_brackets_in_versions_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(H20.read_text().replace("nccl: 2.28.9", 'nccl: "2.28.9 [/bold]"'))
    for arguments in ([str(path)], [str(path), "--plan", "suspend"]):
        out, _ = gates(capsys, *arguments)
        assert "NCCL 2.28.9 [/bold]" in out


def test_verdicts_are_plain_values() -> None:
    verdict = judge(BASELINE, GOOD)
    assert isinstance(verdict, Verdict)
    assert json.loads(json.dumps(verdict.as_dict()))["plan"] == "reload"
