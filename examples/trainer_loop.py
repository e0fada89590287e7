"""A trainer and a rollout engine that take turns on the same devices, switched by Pitstop.

    torchrun --standalone --nproc-per-node 2 examples/trainer_loop.py

The model is two of Megatron-core's parallel layers, each split over two ranks. Without GPUs it runs over gloo (where
torch comes without Triton, megatron-core has to be older than 0.19); with GPUs, start the ranks as docs/runtime.md says
under "Start". ``Engine`` stands where SGLang would. All that a trainer writes for Pitstop is in ``main``, ``export``,
``clients`` and ``memory_saver``.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from pitstop.gates import TORCH_MEMORY_SAVER, Facts
from pitstop.loading import load_scenario
from pitstop.plan import named_plan
from pitstop.telemetry import RunManifest
from pitstop_runtime.groups import BACKEND_NAME
from pitstop_runtime.manager import Settings, SwitchManager
from pitstop_runtime.recommendation import RecommendationClient
from pitstop_runtime.saver import NullSaver, ParameterCheck, Saver, TorchMemorySaver, host_budget
from pitstop_runtime.sync import WeightSync
from pitstop_runtime.telemetry import TelemetryClient

HIDDEN = 64
SCENARIO = Path(__file__).with_name("h200x2-tp2.yaml")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Let the engine roll out, train on that, and again."""
    options = parse()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND_NAME)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model, engine = Model(), Engine()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    facts = Facts(
        role="actor",
        colocated=True,
        fully_async=False,
        uses_critic=False,
        uses_cuda_graphs=False,
        weights_backed_up=True,
        weight_transfer="ipc",
    )
    saver = memory_saver()
    telemetry, recommendations = clients(options)
    manager = SwitchManager(
        options.plan,
        saver=saver,
        facts=facts,
        settings=Settings(require_confirmation=True),
        check=ParameterCheck(model.named_parameters),
        on_record=telemetry.submit,
        recommendations=recommendations,
    )

    for step in range(options.steps):
        weights = model.host_copy()
        with manager.sleeping(step):
            plan = manager.plan.name
            engine.resume()
            manager.update_weights(partial(export, weights, engine, saver))
            samples = engine.rollout(step)
            engine.release()
        with manager.training():
            loss = train(model, optimizer, samples)
        if dist.get_rank() == 0:
            print(f"step {step}: switched by {plan}, loss {loss:.4f}", flush=True)

    manager.shutdown()
    telemetry.close()
    recommendations.close()
    dist.destroy_process_group()


def export(weights: dict[str, tuple[Tensor, int]], engine: Engine, saver: Saver, sync: WeightSync) -> None:
    """Gather the shards and hand whole tensors to the engine, while the trainer's own memory is paused."""
    group = parallel_state.get_tensor_model_parallel_group()
    with saver.disabled():
        for name, (backup, axis) in weights.items():
            shard = backup.to(DEVICE)
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            with sync.gather():
                dist.all_gather(shards, shard, group=group)
            with sync.load():
                engine.load(name, torch.cat(shards, axis))
    sync.confirm(sent=len(weights), loaded=len(engine.weights))


def clients(options: argparse.Namespace) -> tuple[TelemetryClient, RecommendationClient]:
    """What talks to the service; off without an address, and on all ranks but the first."""
    scenario = load_scenario(SCENARIO)
    manifest = RunManifest(scenario=scenario, plan=named_plan(options.plan), started_at=datetime.now(UTC))
    first = dist.get_rank() == 0
    url, spool = (options.service, options.spool) if first else (None, None)
    return TelemetryClient(manifest, url, spool), RecommendationClient(url, scenario)


def memory_saver() -> Saver:
    """What pauses the trainer's memory; without GPUs there is none to pause, and a stand-in opens the gates."""
    if DEVICE.type == "cuda":
        return TorchMemorySaver(host_budget_bytes=host_budget(ranks_per_node=2))
    saver = NullSaver()
    saver.name = TORCH_MEMORY_SAVER
    return saver


class Model(torch.nn.Module):
    """Two layers, each split over the tensor-parallel ranks by Megatron-core."""

    def __init__(self) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            tensor_model_parallel_size=2,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        shared = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False}
        torch.manual_seed(0)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **shared)
        self.down = RowParallelLinear(
            4 * HIDDEN, HIDDEN, input_is_parallel=True, skip_bias_add=False, **shared
        )
        self.to(DEVICE)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, hidden) in and out."""
        return self.down(torch.relu(self.up(inputs)[0]))[0]

    def host_copy(self) -> dict[str, tuple[Tensor, int]]:
        """Copies of this rank's shards that can be read while device memory is paused, and their split axes."""
        return {
            "up": (self.up.weight.detach().cpu().clone(), 0),
            "down": (self.down.weight.detach().cpu().clone(), 1),
        }


class Engine:
    """A stand-in for a rollout engine: whole weights, and answers computed with them; on the host, to be simple."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._awake = False

    def resume(self) -> None:
        """Take over; what was loaded before is gone."""
        self._awake = True
        self.weights.clear()

    def load(self, name: str, weight: Tensor) -> None:
        """Take a whole weight."""
        assert self._awake
        self.weights[name] = weight.cpu().clone()

    def rollout(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and the model's answers to them, each of shape (batch, hidden)."""
        inputs = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(step))
        return inputs, torch.relu(inputs @ self.weights["up"].t()) @ self.weights["down"].t()

    def release(self) -> None:
        """Let go."""
        self._awake = False
        self.weights.clear()


def train(model: Model, optimizer: torch.optim.Optimizer, samples: tuple[Tensor, Tensor]) -> float:
    """One step on the engine's samples; the model learns to repeat its inputs backwards. Returns the loss."""
    inputs, answers = (each.to(DEVICE) for each in samples)
    outputs = model(inputs)
    torch.testing.assert_close(outputs, answers, rtol=1e-3, atol=1e-3)  # the engine had these very weights
    loss = (outputs - inputs.flip(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
    optimizer.step()
    return loss.item()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="lean")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--service", default=os.environ.get("PITSTOP_URL"), help="address of the service")
    parser.add_argument("--spool", type=Path, help="folder for records that are not sent yet")
    return parser.parse_args()


if __name__ == "__main__":
    main()
