"""A packed batch gives the log-probs and gradients of the padded one, without flash-attn."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from qarl_openrlhf.actors import varlen_attention
from qarl_openrlhf.patches.flash_attn import pad_input, unpad_input

SHAPE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip
LENGTHS = (7, 1, 12, 5)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")])]


def model_of(config, implementation, dtype, device):
    torch.manual_seed(0)
    config._attn_implementation = implementation
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(device, dtype)


def log_probs(logits, tokens):
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_packed_equals_padded(config_class, checkpointing, device):
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 4e-2)
    varlen_attention.register()
    tokens = torch.randint(3, 97, (len(LENGTHS), 16), device=device)
    attention_mask = torch.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        attention_mask[row, 2 : 2 + length] = 1  # padding on both sides
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    following = torch.roll(tokens, -1, 1)

    padded = model_of(config_class(**SHAPE), "sdpa", dtype, device)
    mine = log_probs(padded(tokens, attention_mask=attention_mask, position_ids=positions).logits, following)
    (mine * attention_mask).sum().backward()

    packed = model_of(config_class(**SHAPE), varlen_attention.NAME, dtype, device)
    if checkpointing:
        packed.train()
        packed.gradient_checkpointing_enable()
    flat, indices, *_ = unpad_input(tokens[..., None], attention_mask)
    rows = [x.flatten()[indices][None] for x in (positions, following)]
    logits = packed(flat.T, attention_mask=None, position_ids=rows[0], use_cache=False).logits
    theirs = pad_input(log_probs(logits, rows[1])[0], indices, *tokens.shape)
    theirs.sum().backward()

    assert torch.allclose(theirs, mine * attention_mask, atol=tolerance, rtol=tolerance)
    for (name, a), b in zip(padded.named_parameters(), packed.parameters(), strict=True):
        scale = a.grad.abs().max()
        assert (a.grad - b.grad).abs().max() <= tolerance * max(scale, 1e-3), name


def test_sequences_do_not_see_each_other():
    varlen_attention.register()
    model = model_of(LlamaConfig(**SHAPE), varlen_attention.NAME, torch.float32, "cpu")
    tokens = torch.randint(3, 97, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    before = model(tokens, position_ids=positions).logits
    tokens[0, 1] = 5
    after = model(tokens, position_ids=positions).logits
    assert not torch.equal(before[0, 1:4], after[0, 1:4])
    assert torch.equal(before[0, 4:], after[0, 4:])


def test_padded_batches_still_work():
    varlen_attention.register()
    tokens = torch.randint(3, 97, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    outputs = [
        model_of(LlamaConfig(**SHAPE), name, torch.float32, "cpu")(tokens, attention_mask=mask).logits
        for name in ("sdpa", varlen_attention.NAME)
    ]
    assert torch.equal(*outputs)


def test_bounds():
    bounds, longest = varlen_attention.sequence_bounds(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert bounds.tolist() == [0, 3, 4, 6] and bounds.dtype == torch.int32 and longest == 3
