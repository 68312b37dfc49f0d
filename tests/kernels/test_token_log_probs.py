"""Log-probs of tokens from BF16 logits against float64: on a card, or under Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from qarl_openrlhf.actors.chunked_log_probs import ChunkedLogProbs  # noqa: E402
from qarl_openrlhf.kernels import dispatch, reference  # noqa: E402
from qarl_openrlhf.kernels.token_log_probs import token_log_probs, token_log_probs_backward_  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels(device):
    dispatch.card()
    dispatch.set_kernel("auto" if device == "cuda" else "triton")
    yield
    dispatch.set_kernel("auto")


def made(rows, vocabulary, device, spread=3.0):
    """(logits, targets, gradient of log-prob and entropy); the numbers are the same on every device."""
    torch.manual_seed(rows * 100003 + vocabulary)
    logits = (torch.randn(rows, vocabulary) * spread).to(BF16)
    targets = torch.randint(0, vocabulary, (rows,))
    if rows > 1:
        targets[0], targets[1] = 0, vocabulary - 1
    return logits.to(device), targets.to(device), torch.randn(rows, 2).to(device)


def exact(logits, targets, grads, temperature, entropy):
    """float64: values, logsumexp, gradient of the logits."""
    x = logits.double().requires_grad_()
    z = x / temperature
    log_p = torch.log_softmax(z, -1)
    values = [log_p.gather(-1, targets[:, None])[:, 0]] + ([-(log_p.exp() * log_p).sum(-1)] if entropy else [])
    values = torch.stack(values, -1)
    (gradient,) = torch.autograd.grad((values * grads[:, : values.shape[1]].double()).sum(), x)
    return values.detach(), torch.logsumexp(z, -1).detach(), gradient


@pytest.mark.parametrize("rows, vocabulary", [(1, 1), (3, 97), (2, 1024), (5, 4096), (4, 4097), (3, 9001)])
@pytest.mark.parametrize("temperature, entropy", [(1.0, False), (0.7, True)])
def test_values_and_gradient(rows, vocabulary, temperature, entropy, device):
    logits, targets, grads = made(rows, vocabulary, device)
    want_values, want_lse, want_gradient = exact(logits, targets, grads, temperature, entropy)
    before = logits.clone()
    values, lse = token_log_probs(logits, targets, temperature, entropy)
    assert torch.equal(logits, before) and values.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(values.double(), want_values, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)
    token_log_probs_backward_(logits, targets, values, lse, grads[:, : values.shape[1]], temperature)
    # One rounding to BF16, after float32 arithmetic whose terms are as large as the gradient of the log-prob.
    error = (logits.double() - want_gradient).abs()
    assert (error <= 2**-8 * want_gradient.abs() + 1e-6 * grads.abs().sum(-1, keepdim=True) / temperature).all()


def test_gradient_is_the_references_to_one_rounding(device):
    logits, targets, grads = made(6, 5000, device)
    values, lse = token_log_probs(logits, targets, 1.0, True)
    theirs = reference.token_log_probs_backward(logits, targets, values, lse, grads, 1.0)
    token_log_probs_backward_(logits, targets, values, lse, grads, 1.0)
    assert (logits == theirs).float().mean() > 0.99
    torch.testing.assert_close(logits, theirs, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_far_apart_and_rows_of_a_wider_tensor(entropy, device):
    wide = torch.full((3, 5000), float("nan"), dtype=BF16, device=device)
    logits = wide[:, :4500]
    logits.copy_(torch.linspace(-3e4, 3e4, 4500).to(BF16))
    logits[1] = -torch.inf
    logits[1, 4400] = 2.0  # all of the probability
    targets = torch.tensor([4499, 4400, 0], device=device)
    values, lse = token_log_probs(logits, targets, 1.0, entropy)
    want, want_lse, _ = exact(logits, targets, torch.ones(3, 2, device=device), 1.0, False)
    torch.testing.assert_close(values[:, :1].double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)
    assert not entropy or values[1, 1] == 0  # one token has all of the probability
    token_log_probs_backward_(logits, targets, values, lse, torch.ones_like(values), 1.0)
    assert logits.isfinite().all() and wide[:, 4500:].isnan().all()
    assert logits[1, 4400] == 0 and logits[2, 0] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad, device):
    logits, targets, _ = made(3, 5000, device)
    logits[1, 4321] = bad
    values, lse = token_log_probs(logits, targets, 1.0, True)
    assert not values[1].isfinite().any() and not lse[1].isfinite()
    assert values[[0, 2]].isfinite().all()


def test_none_and_refusals(device):
    logits, targets, _ = made(3, 50, device)
    values, lse = token_log_probs(logits[:0], targets[:0], 1.0, True)
    assert values.shape == (0, 2) and lse.shape == (0,)
    token_log_probs_backward_(logits[:0], targets[:0], values, lse, values, 1.0)
    with pytest.raises(TypeError, match="bfloat16 logits with contiguous rows"):
        token_log_probs(logits.float(), targets, 1.0, False)
    with pytest.raises(TypeError, match="strides"):
        token_log_probs(logits.t(), targets[:1].expand(50), 1.0, False)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_learners_log_probs_go_through_the_kernels(entropy, device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 32), torch.randn(97, 32) / 32**0.5
    rows, targets, grads = torch.arange(1, 23, 2), torch.randint(0, 97, (11,)), torch.randn(23, 1 + entropy)
    kept = {}
    for kernel in ("torch", "auto" if device == "cuda" else "triton"):
        dispatch.set_kernel(kernel)
        calls = dispatch.kernel_calls()
        x, w = (t.to(device, BF16).requires_grad_() for t in (hidden, weight))
        values = ChunkedLogProbs.apply(x, w, None, rows.to(device), targets.to(device), 0.9, 4, entropy)
        values.backward(grads.to(device))
        kept[kernel] = values.detach(), x.grad, w.grad
        new = {name: n - calls.get(name, 0) for name, n in dispatch.kernel_calls().items() if "token_log_probs" in name}
        chunks = 0 if kernel == "torch" else 3
        assert all(n == chunks for n in new.values()) and (len(new) == 2 or not chunks)
    (values, dx, dw), (kernel_values, kernel_dx, kernel_dw) = kept.values()
    torch.testing.assert_close(kernel_values, values, atol=2e-6, rtol=2e-6)
    for mine, theirs in ((kernel_dx, dx), (kernel_dw, dw)):
        assert (mine.double() - theirs.double()).norm() <= 2**-8 * theirs.double().norm()
