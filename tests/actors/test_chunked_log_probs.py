"""``--actor.logprob_chunk``: the numbers of the whole product, r = 1 before the first update, no logits of a micro-batch."""

import weakref

import pytest
import torch

from qarl_openrlhf.actors.chunked_log_probs import ChunkedHead, ChunkedLogProbs
from qarl_openrlhf.kernels import product
from qarl_openrlhf.quant.errors import QuantError
from tests.actors.test_learner import RecordingLoss, fill

T, H, V = 23, 32, 97


def inputs(dtype, seed=0, bias=False):
    torch.manual_seed(seed)
    hidden = torch.randn(T, H, dtype=dtype).requires_grad_()
    weight = (torch.randn(V, H, dtype=dtype) / H**0.5).requires_grad_()
    b = torch.randn(V, dtype=dtype).requires_grad_() if bias else None
    rows = torch.tensor([0, 2, 3, 4, 7, 8, 11, 12, 13, 14, 19, 22])
    return hidden, weight, b, rows, torch.randint(0, V, (len(rows),)), torch.randn(len(rows)), torch.randn(len(rows))


def whole(hidden, weight, bias, rows, targets, temperature):
    """OpenRLHF's arithmetic on the rows: float32 logits of all of them."""
    from openrlhf.models.utils import compute_entropy, log_probs_from_logits  # after our patches

    logits = torch.nn.functional.linear(hidden[rows], weight, bias).float()
    logits = logits / temperature if temperature != 1.0 else logits
    return log_probs_from_logits(logits, targets), compute_entropy(logits)


@pytest.mark.parametrize("chunk", [100, 12, 5, 1])
@pytest.mark.parametrize("temperature, bias", [(1.0, False), (0.7, True)])
def test_float32_values_and_gradients_are_those_of_the_whole_product(chunk, temperature, bias):
    results = []
    for chunked in (False, True):
        hidden, weight, b, rows, targets, g_log_prob, g_entropy = inputs(torch.float32, bias=bias)
        if chunked:
            values = ChunkedLogProbs.apply(hidden, weight, b, rows, targets, temperature, chunk, True)
            others = torch.ones(T, dtype=torch.bool)
            others[rows] = False
            assert not values[others].any()
            log_probs, entropy = values[rows].unbind(-1)
        else:
            log_probs, entropy = whole(hidden, weight, b, rows, targets, temperature)
        (log_probs @ g_log_prob + entropy @ g_entropy).backward()
        results.append([log_probs, entropy, hidden.grad, weight.grad] + ([b.grad] if bias else []))
    for name, mine, theirs in zip(("log-probs", "entropy", "dX", "dW", "db"), results[1], results[0]):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_one_chunk_is_the_whole_product_bit_for_bit_without_an_entropy_gradient():
    results = []
    for chunked in (False, True):
        hidden, weight, _, rows, targets, g_log_prob, _ = inputs(torch.float32)
        if chunked:
            log_probs = ChunkedLogProbs.apply(hidden, weight, None, rows, targets, 1.0, T, False)[rows, 0]
        else:
            log_probs, _ = whole(hidden, weight, None, rows, targets, 1.0)
        (log_probs * g_log_prob).sum().backward()
        results.append((log_probs, hidden.grad, weight.grad))
    for mine, theirs in zip(*results):
        assert torch.equal(mine, theirs)


def test_bf16_is_within_the_rounding_of_the_products():
    exact, rounded = [], []
    for dtype, kept in ((torch.float64, exact), (torch.bfloat16, rounded)):
        hidden, weight, _, rows, targets, g, _ = inputs(torch.bfloat16)
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        if dtype == torch.float64:
            log_probs = torch.log_softmax(hidden[rows] @ weight.t(), -1).gather(-1, targets[:, None])[:, 0]
        else:
            log_probs = ChunkedLogProbs.apply(hidden, weight, None, rows, targets, 1.0, 5, False)[rows, 0]
        (log_probs * g).sum().backward()
        kept += [log_probs.detach(), hidden.grad, weight.grad]
    for mine, truth in zip(rounded, exact):
        assert (mine.double() - truth).abs().max() <= 2**-7 * truth.abs().max()


def test_dtypes_are_those_that_lm_head_itself_takes():
    """The error of QuantLinear for a float32 input of a BF16 lm_head; the same numbers under autocast as without."""
    hidden, weight, _, rows, targets, g, _ = inputs(torch.bfloat16)
    network = torch.nn.Module()
    network.head = torch.nn.Linear(H, V, bias=False).bfloat16()
    network.head.weight.data.copy_(weight.detach())
    network.get_output_embeddings = lambda: network.head
    found = []
    for cast in (False, True):
        x = hidden.detach().to(torch.float32 if cast else torch.bfloat16).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast), ChunkedHead(network, 5).reading(rows, targets, 1.0, True):
            values = network.head(x)
            (values[rows, 0] * g).sum().backward()
        found.append((values.detach(), x.grad.bfloat16()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found))
    with ChunkedHead(network, 5).reading(rows, targets, 1.0, True):
        with pytest.raises(QuantError, match=r"lm_head: the input is torch\.float32 and the weight torch\.bfloat16"):
            network.head(hidden.detach().float())


def test_nothing_of_tokens_times_vocabulary_is_kept_for_the_backward():
    hidden, weight, _, rows, targets, *_ = inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        ChunkedLogProbs.apply(hidden, weight, None, rows, targets, 1.0, 4, True)
    assert kept and all(V not in shape or shape == weight.shape for shape in kept)


@pytest.mark.parametrize("rows_a_chunk", [2, 4, 100])
def test_of_a_backward_one_chunk_is_there_at_a_time(monkeypatch, rows_a_chunk):
    """Logits and gradients of a chunk are gone when the next one's are made, and when the sum gets lm_head's dtype."""
    living, seen = [], []

    def watched(name):
        call = getattr(product, name)

        def run(*args, **kwargs):
            if name == "forward":
                assert not any(ref() is not None for ref in living)
                living.clear()
            made = call(*args, **kwargs)
            living.extend(weakref.ref(tensor) for tensor in (made if isinstance(made, tuple) else (made,)) if tensor is not None)
            return made

        monkeypatch.setattr(product, name, run)

    hidden, weight, _, rows, targets, g, _ = inputs(torch.bfloat16)
    log_probs = ChunkedLogProbs.apply(hidden, weight, None, rows, targets, 1.0, rows_a_chunk, False)[rows, 0]
    watched("forward"), watched("backward")
    to = torch.Tensor.to

    def convert(tensor, *args, **kwargs):
        if tensor.shape == weight.shape and tensor.dtype == torch.float32:
            seen.append([ref() is not None for ref in living])
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", convert)
    (log_probs * g).sum().backward()
    assert seen and seen[-1] and not any(seen[-1])


def test_a_micro_batch_without_response_tokens_stays_on_the_graph():
    hidden, weight, *_ = inputs(torch.float32)
    none = torch.zeros(0, dtype=torch.long)
    values = ChunkedLogProbs.apply(hidden, weight, None, none, none, 1.0, 4, True)
    values.sum().backward()
    assert not values.any() and not hidden.grad.any() and not weight.grad.any()


# ---- in the learner ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "padded": {},
    "packed": {"ds__packing_samples": True},
    "dynamic": {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 64, "rollout__max_tokens_per_gpu": 64},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zero", [2, 3])
def test_log_ratio_is_exactly_zero_before_the_first_update(make_learner, rollout, layout, zero):
    flags = LAYOUTS[layout] | {"actor__logprob_chunk": 7, "actor__entropy_coef": 0.01, "ds__zero_stage": zero}
    learner = make_learner("qwen2", tied=zero == 3, **flags)
    fill(learner, rollout())
    learner.actor_loss_fn = recording = RecordingLoss(learner.actor_loss_fn.objective)
    metrics = learner.ppo_train(0.0)
    seen = recording.largest_log_ratio
    assert set(seen[: len(seen) // 2]) == {0.0} and max(seen) > 0
    assert metrics["objective/in_band_frac_by_update/0"] == 1.0 and metrics["policy/entropy"] > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_log_probs_and_entropy_of_responses_are_those_without_chunks(make_learner, rollout, layout):
    learner = make_learner("qwen3", rollout__temperature=0.7, **LAYOUTS[layout])
    fill(learner, rollout())
    for batch in learner._fixed_micro_batches():
        inputs = (batch.sequences, batch.action_mask, batch.attention_mask)
        mask = batch.action_mask.bool()
        results = []
        for chunk in (0, 5, 10**6):
            learner.actor.logprob_chunk, learner.actor.chunked_head = chunk, None
            with torch.no_grad():
                log_probs, output = learner.actor(*inputs, return_output=True, return_entropy=True)
            results.append((log_probs, output.entropy))
            assert (output["logits"] is None) == bool(chunk)
        for log_probs, entropy in results[1:]:
            assert torch.equal(log_probs != 0, results[0][0] != 0)
            torch.testing.assert_close(log_probs, results[0][0], atol=1e-4, rtol=0)
            torch.testing.assert_close(entropy[mask], results[0][1][mask], atol=1e-4, rtol=0)


def test_an_update_is_that_without_chunks(make_learner, rollout):
    """One optimizer step of the same rollout: weights apart by no more than rounding of the gradients moves AdamW."""
    moved = []
    for chunk in (0, 7):
        learner = make_learner("llama", actor__logprob_chunk=chunk, train__batch_size=16, quant__scheme="bf16")
        before = [p.detach().clone() for p in learner.actor.network.parameters()]
        fill(learner, rollout())
        torch.manual_seed(5)
        learner.ppo_train(0.0)
        moved.append([(p.detach() - b).float() for p, b in zip(learner.actor.network.parameters(), before, strict=True)])
    for with_all, with_chunks in zip(*moved, strict=True):
        same = (with_all.sign() == with_chunks.sign()).float().mean()  # AdamW's first step is the gradient's sign
        assert same > 0.99, float(same)


def test_a_model_that_changes_its_logits_is_refused():
    class Softcapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(H, V, bias=False)

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, hidden):
            return torch.tanh(self.lm_head(hidden) / 30) * 30

    model = Softcapped()
    head = ChunkedHead(model, 4)
    rows, targets = torch.arange(3), torch.arange(3)
    with head.reading(rows, targets, 1.0, False):
        logits = model(torch.randn(1, T, H))
    with pytest.raises(QuantError, match="Softcapped changes its logits after lm_head.*--actor.logprob_chunk 0"):
        head.require_untouched(logits)
    assert "forward" not in vars(model.lm_head)


def test_refused(make_learner, capsys):
    with pytest.raises(SystemExit):
        make_learner("llama", actor__logprob_chunk=-1)
    assert "out of range" in capsys.readouterr().err
