"""A scenario: hardware + parallel layout + model + rollout engine + software versions.

Everything a prediction may depend on, and nothing else. Read from YAML or JSON (``pitstop.loading``); unknown
fields are errors, so that a misspelt one is never silently ignored.
"""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from pitstop.errors import FieldError, use_one_of
from pitstop.hardware import GPUS, GpuModel, Link
from pitstop.models import MODEL_PRESETS, ModelShape

SCENARIO_SCHEMA_VERSION: Final = 1
MAX_WORLD_SIZE = 1_048_576


def _no_truth_value(value: object) -> object:
    """YAML reads ``yes`` and ``on`` as true, which pydantic would then take for 1."""
    if isinstance(value, bool):
        raise FieldError("", "a truth value is not a number", "Give a number.")
    return value


_NotBool = BeforeValidator(_no_truth_value)

Positive = Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE), _NotBool]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False), _NotBool]
Bytes = Annotated[int, Field(ge=0, le=2**50), _NotBool]


class StrictModel(BaseModel):
    """Base of all documents: immutable, unknown fields refused, names as written."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_enum_values=False)


class Hardware(StrictModel):
    """The machines: GPU model, how many per node, how many nodes, and how many ranks share one GPU."""

    gpu: str = Field(description="GPU model, a name from `pitstop.hardware.GPUS`", examples=["h200"])
    gpus_per_node: Annotated[int, Field(ge=1, le=72), _NotBool] = Field(
        description="GPUs of one node that the job uses"
    )
    nodes: Positive = Field(default=1, description="nodes that the job uses")
    ranks_per_gpu: Annotated[int, Field(ge=1, le=16), _NotBool] = Field(
        default=1, description="trainer ranks that share one GPU (NCCL >= 2.30 can; 1 in production)"
    )
    link: Link | None = Field(
        default=None, description="link inside a node; default: the GPU model's usual one"
    )
    host: str | None = Field(
        default=None, max_length=200, description="free-form name of the machine or cluster"
    )

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, value: str) -> str:
        name = value.strip().lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
        if name not in GPUS:
            raise FieldError("", "unknown GPU", use_one_of(name, sorted(GPUS)))
        return name

    @property
    def model(self) -> GpuModel:
        """The catalogue entry of this GPU."""
        return GPUS[self.gpu]

    @property
    def intra_node_link(self) -> Link:
        """The link between GPUs of one node."""
        return self.link or self.model.link

    @property
    def ranks_per_node(self) -> int:
        """Trainer ranks on one node."""
        return self.gpus_per_node * self.ranks_per_gpu

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.ranks_per_node * self.nodes


class Layout(StrictModel):
    """Megatron's parallel layout. ``dp`` follows from the world size and is checked if given."""

    tp: Positive = Field(default=1, description="tensor-parallel size")
    pp: Positive = Field(default=1, description="pipeline-parallel size")
    cp: Positive = Field(default=1, description="context-parallel size")
    ep: Positive = Field(default=1, description="expert-parallel size")
    etp: Positive | None = Field(
        default=None, description="expert-tensor-parallel size; Megatron's default is tp"
    )
    dp: Positive | None = Field(default=None, description="data-parallel size; derived if absent")
    order: str = Field(
        default="tp-cp-ep-dp-pp", description="rank order, fastest first, as Megatron spells it"
    )
    dist_opt_instances: Positive = Field(
        default=1, description="num_distributed_optimizer_instances of Megatron (partial sharding)"
    )
    first_stage_layers: Positive | None = Field(
        default=None, description="Megatron's num_layers_in_first_pipeline_stage; even split if absent"
    )
    last_stage_layers: Positive | None = Field(
        default=None, description="Megatron's num_layers_in_last_pipeline_stage; even split if absent"
    )

    @field_validator("order")
    @classmethod
    def _known_order(cls, value: str) -> str:
        tokens = value.split("-")
        known = {"tp", "cp", "ep", "dp", "pp"}
        if len(set(tokens)) != len(tokens) or not set(tokens) <= known:
            problem = f"must list each of {', '.join(sorted(known))} at most once, joined by '-'"
            raise FieldError("", problem, "Leave it out for Megatron's own order.")
        return value

    @property
    def expert_tp(self) -> int:
        """The expert-tensor-parallel size in force."""
        return self.tp if self.etp is None else self.etp

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage.

        Raises:
            ValueError: the layers cannot be split this way.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pp == 1:
            return (num_layers,)
        middle = self.pp - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        if rest < middle or (middle == 0 and rest) or (middle and rest % middle):
            raise FieldError(
                "layout.pp",
                f"{num_layers} layers cannot be split over pp = {self.pp} stages with first_stage_layers = "
                f"{first} and last_stage_layers = {last}: {rest} layers are left for {middle} equal stages",
                "Use a pp that divides the layers, or set first_stage_layers and last_stage_layers.",
            )
        stages = [rest // middle] * middle if middle else []
        return (*([first] if first is not None else []), *stages, *([last] if last is not None else []))


class Precision(StrEnum):
    """Parameter and activation type of the trainer."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Optimizer(StrictModel):
    """Optimizer and precision, as far as they decide bytes and communicators."""

    name: Literal["adam", "sgd"] = Field(default="adam", description="optimizer family")
    precision: Precision = Field(default=Precision.BF16, description="parameter precision")
    distributed: bool = Field(
        default=True, description="Megatron's distributed optimizer (shards state over DP x CP)"
    )
    grad_reduce_in_fp32: bool = Field(
        default=True, description="gradient buffer in fp32 instead of the parameters' type"
    )
    cpu_offload: bool = Field(
        default=False, description="optimizer state kept in host memory by the trainer itself"
    )


class GroupCreation(StrEnum):
    """When communicators come into being."""

    LAZY = "lazy"
    EAGER = "eager"


class Trainer(StrictModel):
    """How the trainer behaves around the switch."""

    group_creation: GroupCreation = Field(
        default=GroupCreation.LAZY,
        description="lazy: a communicator exists once a collective used it (torch's default); "
        "eager: all exist at once (bound device_id, or a touch of every group)",
    )
    gloo_groups: bool = Field(default=True, description="Megatron's create_gloo_process_groups")
    manage_world: bool = Field(
        default=True, description="whether the default group is released and rebuilt too"
    )
    clear_memory: bool = Field(
        default=True, description="whether sleep begins with garbage collection and empty_cache"
    )
    sequence_parallel: bool = Field(default=True, description="sequence parallelism inside TP")
    cooldown_s: Seconds = Field(
        default=2.0, description="fixed wait after each destroy in the `reload` baseline"
    )
    rollout_s: Seconds = Field(
        default=60.0, description="time between weight sync and wake-up; a deferred cooldown runs off in it"
    )
    step_s: Seconds | None = Field(
        default=None, description="whole training step, to express gains as a share"
    )
    saved_bytes_per_rank: Bytes | None = Field(
        default=None,
        description="device bytes that the saver backs up per rank; derived from the model if absent",
    )
    export_bytes_per_rank: Bytes | None = Field(
        default=None,
        description="bytes of this rank's weight shard that the export gathers; derived if absent",
    )


class EngineName(StrEnum):
    """Rollout engines; `none` for a trainer measured alone."""

    SGLANG = "sglang"
    VLLM = "vllm"
    NONE = "none"


class Engine(StrictModel):
    """The rollout engine on the same GPUs."""

    name: EngineName = Field(default=EngineName.SGLANG, description="rollout engine")
    tp: Positive = Field(default=1, description="tensor-parallel size of one engine")
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = Field(
        default=0.7, description="share of device memory for the engine's weights and KV cache"
    )


class Versions(StrictModel):
    """Software versions; unknown ones stay null and are reported as unknown."""

    torch: str | None = Field(default=None, examples=["2.11.0+cu130"])
    cuda: str | None = Field(default=None, examples=["13.0"])
    driver: str | None = Field(default=None, examples=["580.159.04"])
    nccl: str | None = Field(default=None, examples=["2.30.7"])
    saver: str | None = Field(default=None, description="torch_memory_saver", examples=["0.0.10"])
    megatron: str | None = Field(default=None, description="megatron-core", examples=["0.16.1"])
    sglang: str | None = Field(default=None, examples=["0.5.11"])


class Scenario(StrictModel):
    """One thing to predict: where, with which layout, which model, which engine, which versions."""

    schema_version: Literal[1] = Field(
        default=SCENARIO_SCHEMA_VERSION, description="version of this document's schema"
    )
    name: str = Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = Field(default="", max_length=2000)
    hardware: Hardware
    layout: Layout = Field(default_factory=Layout)
    model: ModelShape
    optimizer: Optimizer = Field(default_factory=Optimizer)
    trainer: Trainer = Field(default_factory=Trainer)
    engine: Engine = Field(default_factory=Engine)
    versions: Versions = Field(default_factory=Versions)

    @field_validator("model", mode="before")
    @classmethod
    def _preset(cls, value: object) -> object:
        """A model may be given as a preset's name instead of its shape."""
        if isinstance(value, str):
            if value not in MODEL_PRESETS:
                remedy = f"{use_one_of(value, sorted(MODEL_PRESETS))} Or give the model's shape."
                raise FieldError("", "unknown model", remedy)
            return MODEL_PRESETS[value]
        return value

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        self._check_world()
        self._check_model()
        engine, gpus = self.engine, self.hardware.gpus_per_node * self.hardware.nodes
        if engine.name is not EngineName.NONE and engine.tp > gpus:
            problem = f"one engine over {engine.tp} GPUs does not fit on the scenario's {gpus}"
            raise FieldError("engine.tp", problem, f"Use at most {gpus}.")
        return self

    def _check_world(self) -> None:
        """The ranks can be divided as the layout says, and as Megatron demands."""
        world, layout = self.hardware.world_size, self.layout
        if world > MAX_WORLD_SIZE:
            problem = f"{world} ranks are more than the {MAX_WORLD_SIZE} supported"
            raise FieldError("hardware.nodes", problem, "Use fewer nodes.")
        dense = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
        # Megatron's default for etp is tp: the field to blame is then the one that the user has given.
        expert_tp = "tp" if layout.etp is None else "etp"
        expert = {expert_tp: layout.expert_tp, "ep": layout.ep, "pp": layout.pp}
        for sizes in (dense, expert):
            _check_divides(world, sizes)
        dp, expert_dp = world // prod(dense.values()), world // prod(expert.values())
        if layout.dp is not None and layout.dp != dp:
            problem = f"world size {world} / (tp x pp x cp = {prod(dense.values())}) is {dp}"
            raise FieldError("layout.dp", problem, f"Use {dp}, or leave it out: it is derived.")
        for data_parallel in (dp * layout.cp, expert_dp):
            if data_parallel % layout.dist_opt_instances:
                problem = f"does not divide the data-parallel size {data_parallel}"
                remedy = f"Use a common divisor of {dp * layout.cp} and {expert_dp}."
                raise FieldError("layout.dist_opt_instances", problem, remedy)

    def _check_model(self) -> None:
        """The model can be cut as the layout says."""
        layout, model = self.layout, self.model
        layout.stage_layers(model.num_layers)
        heads, groups, moe = model.num_attention_heads, model.num_query_groups, model.moe
        if heads % groups:
            problem = f"{heads} attention heads are not divisible by {groups} query groups"
            raise FieldError("model.num_query_groups", problem, "Use a divisor of num_attention_heads.")
        if heads % layout.tp:
            problem = f"{heads} attention heads are not divisible by tp = {layout.tp}"
            raise FieldError("layout.tp", problem, f"Use a divisor of {heads}.")
        if moe is None:
            if layout.ep > 1:
                raise FieldError("layout.ep", "the model has no experts", "Use ep = 1, or give model.moe.")
            return
        if moe.num_experts % layout.ep:
            problem = f"{moe.num_experts} experts are not divisible by ep = {layout.ep}"
            raise FieldError("layout.ep", problem, f"Use a divisor of {moe.num_experts}.")
        if moe.topk > moe.num_experts:
            problem = f"{moe.topk} experts per token out of {moe.num_experts}"
            raise FieldError("model.moe.topk", problem, "Use at most num_experts.")
        if moe.first_dense_layers > model.num_layers:
            problem = f"{moe.first_dense_layers} leading dense layers of {model.num_layers} in all"
            raise FieldError("model.moe.first_dense_layers", problem, "Use at most num_layers.")

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.hardware.world_size

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers."""
        return self.world_size // (self.layout.tp * self.layout.pp * self.layout.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the expert layers."""
        return self.world_size // (self.layout.expert_tp * self.layout.ep * self.layout.pp)


def _check_divides(world: int, sizes: dict[str, int]) -> None:
    """Blame the first parallel size that does not fit, taken together with those before it."""
    product = 1
    for name, size in sizes.items():
        product *= size
        if world % product:
            formula = " x ".join(sizes)
            numbers = " x ".join(str(n) for n in sizes.values())
            raise FieldError(
                f"layout.{name}",
                f"world size {world} (nodes x gpus_per_node x ranks_per_gpu) is not divisible by "
                f"{formula} = {numbers} = {prod(sizes.values())}",
                f"Use sizes whose product divides {world}, or change the hardware.",
            )
