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


@pytest.mark.parametrize("name", KERNELS)
def test_a_card_computes_what_a_cpu_does(name):
    scheme = QuantScheme.parse(name)
    before = dispatch.kernel_calls()
    (sent, logits, gradients), (their_sent, their_logits, their_gradients) = run(scheme, "cuda"), run(scheme, "cpu")
    assert sent.keys() == their_sent.keys()
    assert all(torch.equal(sent[n].view(torch.uint8), their_sent[n].view(torch.uint8)) for n in sent)
    # Where rounding chooses another expert a token differs by more: so the mean, and angles of gradients.
    assert (logits - their_logits).abs().mean() < 0.05 * their_logits.abs().mean()
    for n, gradient in gradients.items():
        assert torch.cosine_similarity(gradient.flatten(), their_gradients[n].flatten(), 0) > 0.97, n
    if KERNELS[name]:
        assert dispatch.kernel_calls()[KERNELS[name]] > before.get(KERNELS[name], 0)
