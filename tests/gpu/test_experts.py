"""The learner's mixture-of-experts block on a card: the bytes and, to rounding, the numbers of the CPU's reference."""

import pytest
import torch

from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from tests.tiny_models import VOCABULARY, make_model

KERNELS = {
    "bf16": None,
    "w4a16:g32": "library BF16 grouped",
    "w8a8": "grouped_w8a8",
    "fp8": "_scaled_grouped_mm",
}


def run(scheme: QuantScheme, device: str) -> tuple[dict, torch.Tensor, dict]:
    """(published tensors, logits, gradients), all on the CPU."""
    model = make_model("qwen3_moe", hidden=128).to(device)
    convert_model(model, scheme, cache="dequant")
    ids = torch.randint(4, VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(0)).to(device)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    published = {name: tensor.cpu() for name, tensor in published_tensors(model, scheme)}
    return published, output.logits.detach().float().cpu(), {n: p.grad.float().cpu() for n, p in model.named_parameters()}


def run_block(name: str, device: str) -> tuple[torch.Tensor, dict]:
    """(output, gradients) of one block's experts for given inputs, choices and weights, on the CPU."""
    model = make_model("qwen3_moe", hidden=128).to(device)
    convert_model(model, QuantScheme.parse(name), cache="dequant")
    experts = model.model.layers[0].mlp.experts
    made = torch.Generator().manual_seed(0)
    x = torch.randn(160, 128, generator=made).bfloat16().to(device).requires_grad_()
    ids = torch.stack([torch.randperm(experts.num_experts, generator=made)[:2] for _ in range(160)]).to(device)
    weights = torch.rand(160, 2, generator=made).bfloat16().to(device)
    out = experts(x, ids, weights)
    (out.float() * torch.randn(160, 128, generator=made).to(device)).sum().backward()
    gradients = {n: p.grad.float().cpu() for n, p in experts.named_parameters()} | {"x": x.grad.float().cpu()}
    return out.detach().float().cpu(), gradients


@pytest.mark.parametrize("name", KERNELS)
def test_experts_given_the_same_choices(name):
    (out, gradients), (their_out, their_gradients) = run_block(name, "cuda"), run_block(name, "cpu")
    # Another order of the sums: an activation between two codes may get the other one, in a few values of a row.
    assert (out - their_out).abs().max() < 2**-5 * their_out.abs().max()
    assert (out - their_out).norm() < 2**-7 * their_out.norm()
    for n, gradient in gradients.items():
        assert (gradient - their_gradients[n]).norm() < 2**-6 * their_gradients[n].norm(), n


@pytest.mark.parametrize("name", KERNELS)
def test_a_card_computes_what_a_cpu_does(name):
    scheme = QuantScheme.parse(name)
    before = dispatch.kernel_calls()
    (sent, logits, gradients), (their_sent, their_logits, their_gradients) = run(scheme, "cuda"), run(scheme, "cpu")
    assert sent.keys() == their_sent.keys()
    assert all(torch.equal(sent[n].view(torch.uint8), their_sent[n].view(torch.uint8)) for n in sent)
    # Where rounding chooses another expert a token differs by more (test_experts_given_the_same_choices has none of that): so
    # the median, and angles of gradients.
    apart = (logits - their_logits).abs().mean(-1) / their_logits.abs().mean(-1)
    print(f"{name}: tokens apart by {apart.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()}")
    assert apart.median() < 0.05
    for n, gradient in gradients.items():
        limit = 0.9 if n.endswith("mlp.gate.weight") else 0.97  # a router's gradient is made of the choices themselves
        assert torch.cosine_similarity(gradient.flatten(), their_gradients[n].flatten(), 0) > limit, n
    if KERNELS[name]:
        assert dispatch.kernel_calls()[KERNELS[name]] > before.get(KERNELS[name], 0)
