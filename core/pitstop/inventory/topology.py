"""The sizes and options that decide which groups Megatron-core makes, checked as it checks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from pitstop.errors import FieldProblem, InvalidScenarioError, show_value
from pitstop.inventory.versions import DEFAULT_MEGATRON, MegatronRules, megatron_rules
from pitstop.scenario import MAX_WORLD_SIZE, Scenario

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
GTP = "gtp_remat"


@dataclass(frozen=True, slots=True)
class Topology:
    """Arguments of ``initialize_model_parallel`` that decide groups, plus the world size.

    ``etp`` None means Megatron's default (tp). ``all_gather_group`` is ``create_all_gather_group`` up to
    0.17 and a later call of ``create_all_gather_groups`` from 0.18 on. ``gtp`` and ``egtp`` (generalized
    tensor parallelism) exist from 0.19 on. Hierarchical and hybrid context parallelism are not covered.

    Raises:
        InvalidScenarioError: Megatron would refuse these sizes.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    dist_opt_instances: int = 1
    gloo_groups: bool = True
    all_gather_group: bool = False
    gtp: int = 1
    egtp: int = 1
    megatron: str | None = DEFAULT_MEGATRON

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "cp", "ep", "dist_opt_instances", "gtp", "egtp"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_WORLD_SIZE:
                _refuse(name, value, f"must be between 1 and {MAX_WORLD_SIZE}", "Correct it.")
        dense = self.tp * self.pp * self.cp * self.gtp
        expert = self.expert_tp * self.ep * self.pp * self.egtp
        for what, product in (("tp x pp x cp", dense), ("etp x ep x pp", expert)):
            if self.world_size % product:
                _refuse(
                    "world_size",
                    self.world_size,
                    f"is not divisible by {what} = {product}",
                    "Change one of them.",
                )
        if (self.dp * self.cp) % self.dist_opt_instances or self.expert_dp % self.dist_opt_instances:
            _refuse(
                "dist_opt_instances",
                self.dist_opt_instances,
                f"divides not both dp x cp = {self.dp * self.cp} and expert dp = {self.expert_dp}",
                "Use a common divisor.",
            )
        self._check_order()
        self._check_version()

    def _check_order(self) -> None:
        tokens = self.order.split("-")
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp}
        if len(set(tokens)) != len(tokens) or not set(tokens) <= set(sizes):
            _refuse(
                "order", self.order, "must list each of tp, cp, ep, dp, pp at most once", "Use the default."
            )
        # The expert grid has its own tp and dp: a token may be left out only where both grids have size 1.
        wide = {"tp": max(self.tp, self.expert_tp), "dp": max(self.dp, self.expert_dp)}
        for name, size in (sizes | wide).items():
            if size > 1 and name not in tokens:
                _refuse("order", self.order, f"leaves out {name}, whose size is {size}", f"Add {name}.")
        if self.rules.has_gtp and "tp" not in tokens:
            # 0.19 looks for "tp" by substring and finds it in "gtp_remat", so that it never adds the missing
            # axis.
            _refuse("order", self.order, "leaves out tp, which megatron-core 0.19 cannot handle", "Add tp.")
        if not self.order.endswith("pp") and self.pp > 1 and self.expert_dp != self.dp:
            _refuse(
                "order",
                self.order,
                f"does not end in pp, and dp = {self.dp} differs from expert dp = {self.expert_dp}",
                "Use an order that ends in pp.",
            )

    def _check_version(self) -> None:
        if max(self.gtp, self.egtp) == 1:
            return
        if not self.rules.has_gtp:
            _refuse(
                "megatron",
                self.megatron,
                "has no generalized tensor parallelism",
                "Use 0.19, or gtp = egtp = 1.",
            )
        if self.dist_opt_instances > 1:
            _refuse("dist_opt_instances", self.dist_opt_instances, "must be 1 with gtp or egtp", "Use 1.")
        if self.all_gather_group:
            _refuse("all_gather_group", True, "fails in megatron-core 0.19 with gtp or egtp", "Leave it out.")

    @classmethod
    def of(cls, scenario: Scenario, megatron: str | None = None) -> Topology:
        """Topology of a scenario; ``megatron`` overrides its version (neither given: the rules of 0.16).

        Raises:
            InvalidScenarioError: Megatron would refuse the layout, or the version is unusable.
        """
        layout = scenario.layout
        return cls(
            world_size=scenario.world_size,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            order=layout.order,
            dist_opt_instances=layout.dist_opt_instances,
            gloo_groups=scenario.trainer.gloo_groups,
            megatron=megatron or scenario.versions.megatron,
        )

    def with_megatron(self, version: str) -> Topology:
        """The same topology under another Megatron version."""
        return replace(self, megatron=version)

    @property
    def rules(self) -> MegatronRules:
        """Rules of the Megatron version in force."""
        return megatron_rules(self.megatron)

    @property
    def expert_tp(self) -> int:
        """Expert-tensor-parallel size in force."""
        return self.tp if self.etp is None else self.etp

    @property
    def experts_apart(self) -> bool:
        """Whether gradients and optimizer state of experts go over the expert groups.

        Without expert parallelism Megatron treats experts like any other parameter, up to 0.18 even if their tensor
        parallelism differs.
        """
        return self.ep > 1 or (self.rules.has_gtp and self.expert_tp != self.tp)

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers (gtp peers not counted)."""
        return self.world_size // (self.tp * self.pp * self.cp * self.gtp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the expert layers (egtp peers not counted)."""
        return self.world_size // (self.expert_tp * self.ep * self.pp * self.egtp)


def _refuse(field: str, value: object, problem: str, remedy: str) -> NoReturn:
    raise InvalidScenarioError(
        "Megatron would refuse this layout",
        [FieldProblem(f"layout.{field}", show_value(value), problem, remedy)],
    )
