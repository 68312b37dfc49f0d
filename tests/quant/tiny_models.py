"""Tiny random dense models of the three supported families."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

_COMMON = dict(
    vocab_size=160,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**_COMMON | kw),
    "qwen2": lambda **kw: Qwen2Config(**_COMMON | kw),
    "qwen3": lambda **kw: Qwen3Config(head_dim=32, **_COMMON | kw),
}
MOE = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, head_dim=32, initializer_range=0.05
)
LAYERS = 2
LINEARS = 7 * LAYERS
MOE_LAYERS = 6 * LAYERS  # q, k, v, o, and two stacked expert weights


def tiny(family: str = "llama", dtype=torch.bfloat16, **kwargs):
    """A model whose weights, biases and norms are all far from their initial values."""
    return _filled(CONFIGS[family](**kwargs), dtype)


def tiny_moe(dtype=torch.bfloat16, **kwargs):
    """Qwen3-MoE: two layers of four experts, two of them a token."""
    return _filled(Qwen3MoeConfig(**_COMMON | MOE | kwargs), dtype)


def _filled(config, dtype):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + ("norm" in name))
            else:
                p.mul_(3)
    return model


def tokens(rows: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(3, 160, (rows, length), generator=torch.Generator().manual_seed(5))


def loss_of(model) -> torch.Tensor:
    ids = tokens()
    return model(input_ids=ids, labels=ids).loss
