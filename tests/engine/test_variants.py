"""Engines that cost a start-up each: tensor parallel, tied embeddings, the BF16 scheme, BF16 arithmetic."""

import pytest
import ray
import torch
from vllm import SamplingParams

from . import tiny
from .conftest import Bench
from .test_parity import TEXT, learner_effective_weights

pytestmark = pytest.mark.slow

# kind, scheme, tensor parallel size, dtype, shape, largest |delta logp| against the learner
VARIANTS = {
    "w4a16 tp2": ("qwen3", "w4a16:g32", 2, torch.float32, {}, 1e-3),
    "w4a16 tp2, one kv head on both ranks": ("llama", "w4a16:g32", 2, torch.float32, {"num_key_value_heads": 1}, 1e-3),
    # Each rank of vLLM's row-parallel layers quantizes its own half of the activations, by its own maximum: not the
    # learner's arithmetic, which knows no ranks.
    "w8a8 tp2": ("qwen2", "w8a8", 2, torch.float32, {"initializer_range": 0.05}, 0.5),
    "bf16 tp2, biases, tied": ("qwen2", "bf16", 2, torch.float32, {}, 1e-3),
    "bf16": ("llama", "bf16", 1, torch.float32, {"tie_word_embeddings": True}, 1e-3),
    "rollout only": ("llama", "w4a16:g64:rollout", 1, torch.float32, {"tie_word_embeddings": True}, 1e-3),
    "w4a16 in bf16": ("llama", "w4a16:g64", 1, torch.bfloat16, {"initializer_range": 0.05}, 0.3),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(cluster, tmp_path, variant):
    kind, scheme, tp, dtype, shape, tolerance = VARIANTS[variant]
    learner = tiny.make_learner(kind, scheme, tmp_path, dtype=dtype, **shape)
    engine = tiny.start_engine(learner, tp=tp)
    tiny.ready(engine)
    bench = Bench(learner, [engine])
    try:
        for _ in range(2):
            metrics = bench.publish()
            assert len(bench.publisher.receipts) == tp
            assert metrics["sync/checksum_ok"] == 1.0
            sent, read = learner.tensors(), ray.get(engine.read_tensors.remote(), timeout=60)
            assert read.keys() == sent.keys()
            assert all(torch.equal(read[name], sent[name]) for name in sent)
            mine = learner_effective_weights(learner)
            theirs = ray.get(engine.effective_weights.remote(), timeout=60)
            assert theirs.keys() == mine.keys()
            assert all(torch.equal(theirs[name], mine[name]) for name in mine)
            probed = tiny.probe(engine, TEXT)
            assert (probed - learner.log_probs(TEXT)).abs().max() < tolerance
            params = SamplingParams(temperature=1.0, max_tokens=32)
            output = ray.get(engine.generate.remote([5, 6, 7], params), timeout=60)
            sampled = output.outputs[0]
            theirs = torch.tensor([s[t].logprob for s, t in zip(sampled.logprobs, sampled.token_ids, strict=True)])
            mine = learner.log_probs([5, 6, 7, *sampled.token_ids])[2:]
            assert (theirs - mine).abs().max() < tolerance
            with torch.no_grad():  # the next round has other codes
                for parameter in learner.model.parameters():
                    parameter.add_((torch.randn_like(parameter) * 0.02).to(torch.bfloat16))
    finally:
        bench.publisher.close()
        ray.kill(engine)
