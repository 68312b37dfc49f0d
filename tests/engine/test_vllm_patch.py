"""The CPU sampler draws from the right distribution, is the one vLLM uses, and is what makes sampling cheap."""

import json
import subprocess
import sys
import time

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops import topk_topp_sampler

from qarl_openrlhf.patches import PatchError
from qarl_openrlhf.patches import vllm as patch
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="mends vLLM's CPU sampler")


@pytest.fixture
def original(monkeypatch):
    """vLLM's own function; the patch is undone afterwards."""
    monkeypatch.setattr(topk_topp_sampler, "compiled_random_sample", topk_topp_sampler.compiled_random_sample)
    return topk_topp_sampler.compiled_random_sample


@pytest.mark.parametrize("words", [5, 256, 300, 1000])
def test_distribution(words):
    """Chi-square of 200,000 draws, words of expected count below 10 together."""
    torch.manual_seed(0)
    logits = torch.randn(words) * 2
    logits[1] = float("-inf")
    probs = logits.double().softmax(-1)
    draws = torch.cat([patch.sample(logits.expand(20000, -1)) for _ in range(10)])
    assert draws.dtype == torch.int64
    counts, expected = torch.bincount(draws, minlength=words).double(), probs * len(draws)
    assert len(counts) == words and counts[1] == 0
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4.5 * (2 * degrees) ** 0.5 + 8


def test_the_tail_is_as_likely_as_it_should_be():
    """Half of the mass on 40,000 words of probability 1.25e-5: each draw from the tail is one of them, evenly."""
    logits = torch.zeros(40001)
    logits[40000] = float(torch.log(torch.tensor(40000.0)))
    draws = torch.cat([patch.sample(logits.expand(64, -1)) for _ in range(60)])
    tail = draws[draws < 40000]
    assert 0.45 < len(tail) / len(draws) < 0.55
    assert 0.45 < (tail < 20000).double().mean() < 0.55


def test_a_certain_word_is_always_drawn():
    logits = torch.full((64, 777), float("-inf"))
    logits[torch.arange(64), torch.arange(64) * 12] = 0.0
    assert torch.equal(patch.sample(logits), torch.arange(64) * 12)


def test_vllm_samples_through_it(monkeypatch, original):
    """Fails if vLLM's sampler takes another way than the function that is replaced."""
    sampler = topk_topp_sampler.TopKTopPSampler("processed_logprobs")
    monkeypatch.setattr(patch, "sample", lambda logits: torch.full((logits.shape[0],), 7))
    patch.apply()
    tokens, log_probs = sampler(torch.randn(3, 50), {}, None, None)
    assert tokens.tolist() == [7, 7, 7]
    assert log_probs.shape == (3, 50)


def test_it_is_worth_it(monkeypatch):
    """vLLM's arithmetic for 16 sequences of a 49 k vocabulary, against the patch."""
    logits = torch.randn(16, 49152)

    def vllms(logits):
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return probs.div(torch.empty_like(probs).exponential_()).argmax(dim=-1)

    def seconds(function):
        function(logits)
        started = time.process_time()
        for _ in range(3):
            function(logits)
        return time.process_time() - started

    assert seconds(patch.sample) < seconds(vllms) / 3


SEEDED = """
import json, sys
from qarl_openrlhf.cli.ending import own_process
from qarl_openrlhf.engine.offline import open_engine

def main():
    from vllm import SamplingParams
    options = {"max_num_batched_tokens": int(sys.argv[2]), "max_num_seqs": 8, "enable_prefix_caching": False, "dtype": "float32"}
    llm, _ = open_engine(sys.argv[1], max_model_len=160, options=options)
    prompts = [{"prompt_token_ids": [7 + (i * j) % 100 for j in range(110 + i)]} for i in range(6)]
    params = [SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=10 * i) for i in range(6)]
    print(json.dumps([[list(s.token_ids) for s in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]))

own_process(main)
"""


@pytest.mark.slow
def test_a_seed_gives_the_same_however_prompts_are_cut(tmp_path):
    """A batch of 48 tokens cuts every prompt in three, 100 cuts them across requests; 2,048 cuts none."""
    model = save_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    found = []
    for batch in (2048, 100, 48):
        done = subprocess.run([sys.executable, "-c", SEEDED, model, str(batch)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for samples in found[0] for tokens in samples}) == 12  # k samples of a seed differ, too


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr("qarl_openrlhf.patches.versions.version", lambda package: "0.31.0")
    with pytest.raises(PatchError, match="vllm 0.31.0 is installed"):
        patch.apply()


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_the_learners(monkeypatch, renormalize):
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    from qarl_openrlhf.kernels import moe

    monkeypatch.setattr(fused_topk_router, "vllm_topk_softmax", fused_topk_router.vllm_topk_softmax)
    patch.apply()
    logits = torch.randn(9, 8).bfloat16()
    weights, ids, _ = fused_topk_router.fused_topk(torch.randn(9, 4), logits, 3, renormalize)
    mine, chosen = moe.route(logits, 3, renormalize)
    assert weights.dtype == torch.float32 and torch.equal(weights, mine)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), chosen)
    assert torch.allclose(weights.sum(-1), torch.ones(9)) == renormalize
