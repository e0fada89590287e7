"""Model shapes, and presets for the Qwen3 family.

The presets' figures are those of the models' published ``config.json``; parameter counts derived from them are
checked in the tests against real Megatron-core models of the same shape.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Dim = Annotated[int, Field(ge=1, le=16_777_216)]


class MoeShape(BaseModel):
    """The expert layers of a mixture-of-experts model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: Dim = Field(description="routed experts per MoE layer")
    topk: Dim = Field(description="experts per token")
    ffn_hidden_size: Dim = Field(description="hidden size of one expert's MLP")
    shared_ffn_hidden_size: int = Field(
        default=0, ge=0, description="hidden size of the shared expert's MLP; 0: none"
    )
    first_dense_layers: int = Field(
        default=0, ge=0, description="leading layers with a dense MLP instead of experts"
    )


class ModelShape(BaseModel):
    """A decoder-only transformer as Megatron-core builds it (gated MLP, RMSNorm, rotary positions)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="custom", max_length=120)
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    hidden_size: Dim
    ffn_hidden_size: Dim = Field(description="hidden size of the dense MLP (one of the two gated halves)")
    num_attention_heads: Annotated[int, Field(ge=1, le=65_536)]
    num_query_groups: Annotated[int, Field(ge=1, le=65_536)] = Field(description="key/value heads (GQA)")
    head_dim: Dim
    vocab_size: Dim
    tied_embeddings: bool = Field(default=False, description="output layer shares the input embedding")
    qk_layernorm: bool = Field(default=False, description="RMSNorm on queries and keys, per head dimension")
    gated_mlp: bool = Field(default=True, description="SwiGLU-style MLP (two input projections)")
    add_bias: bool = Field(default=False, description="biases in linear layers (add_bias_linear)")
    add_qkv_bias: bool = Field(default=False, description="bias in the QKV projection only")
    moe: MoeShape | None = None


def _qwen3(name: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=128,
        vocab_size=151_936,
        tied_embeddings=tied,
        qk_layernorm=True,
    )


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, groups: int, expert_ffn: int) -> ModelShape:
    dense = _qwen3(name, layers, hidden, expert_ffn * 8, heads, groups, tied=False)
    return dense.model_copy(update={"moe": MoeShape(num_experts=128, topk=8, ffn_hidden_size=expert_ffn)})


MODEL_PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, 8, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, 8, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 9728, 32, 8, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12288, 32, 8, tied=False),
        _qwen3("qwen3-14b", 40, 5120, 17408, 40, 8, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 25600, 64, 8, tied=False),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 4, 768),
        _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 4, 1536),
    )
}
