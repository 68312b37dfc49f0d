"""What the engine computes with is what the learner computes with: weights bit for bit, log-probs to float32 rounding."""

import pytest
import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf.engine.state import EngineNotReady
from qarl_openrlhf.quant import dequantize_weight

from . import tiny

TEXT = list(range(3, 90))


def distance(bench, a: torch.Tensor, b: torch.Tensor) -> float:
    """In units of what float32 rounding explains: 1e-3 nats at worst for w4a16.

    8-bit activations are not continuous: where rounding noise of 1e-7 moves a value over a code boundary, log-probs move by
    1e-2 in these models (measured: noise of that size in the learner alone does it to a tenth of the tokens). So w8a8 is
    judged by the mean.
    """
    difference = (a - b).abs()
    return float(difference.mean() / 5e-3 if bench.learner.scheme.name == "w8a8" else difference.max() / 1e-3)


def learner_effective_weights(learner: tiny.Learner) -> dict[str, torch.Tensor]:
    modules = learner.model.named_modules()
    return {name: dequantize_weight(m.packed(), m.weight.dtype) for name, m in modules if getattr(m, "scheme", None)}


def assert_same_weights(bench) -> None:
    mine, sent = learner_effective_weights(bench.learner), bench.learner.tensors()
    assert len(mine) == 14
    for engine in bench.engines:
        theirs = ray.get(engine.effective_weights.remote(), timeout=60)
        assert theirs.keys() == mine.keys()
        for name in mine:
            assert theirs[name].dtype == mine[name].dtype
            assert torch.equal(theirs[name], mine[name]), name
        read = ray.get(engine.read_tensors.remote(), timeout=60)
        assert read.keys() == sent.keys()
        for name in sent:
            assert read[name].dtype == sent[name].dtype
            assert torch.equal(read[name], sent[name]), name


def test_nothing_is_sampled_before_the_first_publish(bench):
    assert len(bench.refusals) == 3 * len(bench.engines)
    for error in bench.refusals:
        assert isinstance(error, EngineNotReady)
        assert "EMPTY" in str(error)


def test_effective_weights_are_equal_bit_for_bit(bench):
    metrics = bench.publish()
    assert metrics["sync/checksum_ok"] == 1.0
    assert metrics["sync/buckets"] > 2
    assert metrics["sync/tensors"] == len(bench.learner.tensors())
    assert_same_weights(bench)
    with torch.no_grad():  # a training step
        torch.manual_seed(1)
        for parameter in bench.learner.model.parameters():
            parameter.add_((torch.randn_like(parameter) * 0.02).to(torch.bfloat16))
    before = ray.get(bench.engines[0].effective_weights.remote(), timeout=60)
    bench.publish()
    after = ray.get(bench.engines[0].effective_weights.remote(), timeout=60)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert_same_weights(bench)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_sampled_tokens(bench, temperature):
    bench.publish()
    params = SamplingParams(temperature=temperature, max_tokens=48, seed=3)
    pairs = []
    for engine in bench.engines:
        outputs = ray.get([engine.generate.remote([5 + i, 6, 7], params) for i in range(8)], timeout=120)
        for output in outputs:
            sampled = output.outputs[0]
            theirs = torch.tensor([step[t].logprob for step, t in zip(sampled.logprobs, sampled.token_ids, strict=True)])
            ids = [*output.prompt_token_ids, *sampled.token_ids]
            mine = bench.learner.log_probs(ids, temperature)[2:]
            pairs.append((theirs, mine))
    theirs, mine = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert len(theirs) > 100 * len(bench.engines)
    assert distance(bench, theirs, mine) < 1


def test_every_parameter_reaches_what_the_engine_samples_from(bench):
    """Each parameter in turn: embeddings, norms, q/k norms, biases, tied and untied lm_head, every quantized layer."""
    bench.publish()
    engine = bench.engines[0]
    base = tiny.probe(engine, TEXT)
    parameters = dict(bench.learner.model.named_parameters())
    kinds = {
        "qwen3": ("embed_tokens", "lm_head", "model.norm", "input_layernorm", "q_norm", "k_norm", "down_proj"),
        "qwen2": ("embed_tokens", "model.norm", "q_proj.bias", "k_proj.bias", "v_proj.bias", "down_proj"),
    }[bench.learner.model.config.model_type]
    assert all(any(kind in name for name in parameters) for kind in kinds)
    torch.manual_seed(2)
    for name, parameter in parameters.items():
        old = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_((torch.randn_like(parameter) * old.abs().amax()).to(torch.bfloat16))
        bench.publish()
        new = tiny.probe(engine, TEXT)
        assert distance(bench, new, base) > 2, f"{name} changed, the engine's log-probs did not"
        assert distance(bench, new, bench.learner.log_probs(TEXT)) < 1, name
        with torch.no_grad():
            parameter.copy_(old)
    bench.publish()
    assert torch.equal(tiny.probe(engine, TEXT), base)
