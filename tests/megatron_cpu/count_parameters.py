"""How many parameters does a rank's ``GPTModel`` have? Reads models as JSON lines, writes the counts as JSON lines.

The model is Megatron-core's own, built on torch's meta device: full-size models have their real shapes and no memory.
The world is torch's fake backend, in which one process stands for any rank.

Job: ``world_size``, ``rank``, ``parallel`` (arguments of ``initialize_model_parallel``), ``config`` (arguments of
``TransformerConfig``), ``vocab_size`` and ``tied``. Answer: ``{"dense": ..., "expert": ...}``, of which the second are
the parameters of routed experts.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

from megatron_cpu.compat import stand_in_for_triton_kernels

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
stand_in_for_triton_kernels()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

_META = torch.device("meta")


def count(job: dict[str, Any]) -> dict[str, int]:
    """Build the model of one rank and count."""
    dist.init_process_group("fake", store=FakeStore(), rank=job["rank"], world_size=job["world_size"])
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **job["parallel"])
    try:
        with _META:
            model = _build(job)
        counts = {"dense": 0, "expert": 0}
        for name, parameter in model.named_parameters():
            counts["expert" if ".experts." in name else "dense"] += parameter.numel()
        return counts
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(job: dict[str, Any]) -> torch.nn.Module:
    config = TransformerConfig(
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        perform_initialization=False,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        **job["config"],
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        ),
        vocab_size=job["vocab_size"],
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=job["tied"],
        position_embedding_type="rope",
    )


def main() -> None:
    """Answer each line of the standard input with one line."""
    torch.cuda.current_device = lambda: _META
    # Stages that share a tied embedding agree on its values when they are built; here there are none.
    torch.Tensor.cuda = lambda tensor: tensor
    dist.all_reduce = lambda *_args, **_kwargs: None
    for line in sys.stdin:
        print(json.dumps(count(json.loads(line))))


if __name__ == "__main__":
    main()
