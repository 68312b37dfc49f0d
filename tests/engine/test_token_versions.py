"""Each token carries the weight version it was sampled under, also where an update comes in the middle of a response."""

import time

import ray
import torch
from vllm import SamplingParams

from qarl_openrlhf.engine.token_versions import along

from . import tiny

PROMPTS = [[5 + i, 6, 7] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def likeliest(learner, ids: list[int]) -> torch.Tensor:
    """int64 [len(ids)]: the learner's likeliest token after each of ``ids``."""
    with torch.no_grad(), tiny.quantized_forward(learner.model):
        return learner.model(torch.tensor([ids])).logits[0].argmax(-1)


def test_the_stamps_change_at_the_first_token_of_the_new_weights(qwen3):
    """Two updates arrive while six responses are sampled greedily; version by version, another token is the likeliest.

    The new weights make the old ones' likeliest token impossible, so that a stamp that is off by one is a wrong token.
    """
    head = qwen3.learner.model.lm_head.weight
    old = head.detach().clone()
    versions, models = [], []
    engine = qwen3.engines[0]

    def publish(sign: float) -> None:
        with torch.no_grad():
            head.copy_(old * sign)
        qwen3.publish()
        versions.append(qwen3.version)
        models.append(sign)

    try:
        publish(1.0)
        calls = [engine.generate.remote(prompt, GREEDY) for prompt in PROMPTS]
        for sign in (-1.0, 1.0):
            time.sleep(0.15)
            publish(sign)
        outputs = ray.get(calls, timeout=120)

        seen = set()
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            tokens, stamps = output.outputs[0].token_ids, output.weight_versions
            assert len(stamps) == len(tokens) == 300
            assert stamps == sorted(stamps) and set(stamps) <= set(versions)
            assert output.weight_version == stamps[0]
            seen |= {tuple(sorted(set(stamps)))}
            by_sign = {}
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    head.copy_(old * sign)
                by_sign[sign] = likeliest(qwen3.learner, [*prompt, *tokens])[len(prompt) - 1 : -1].tolist()
            assert all(a != b for a, b in zip(by_sign[1.0], by_sign[-1.0], strict=True))
            sign_of = dict(zip(versions, models, strict=True))
            assert tokens == [by_sign[sign_of[stamp]][i] for i, stamp in enumerate(stamps)]
        assert tuple(versions) in seen, "no response saw all three versions: the updates came too late"
    finally:
        with torch.no_grad():
            head.copy_(old)


def test_nothing_is_kept_of_requests_that_have_ended(qwen3):
    qwen3.publish()
    ray.get([engine.generate.remote([5, 6], SamplingParams(max_tokens=3)) for engine in qwen3.engines], timeout=60)
    tiny.probe(qwen3.engines[0], [5, 6, 7])
    for engine in qwen3.engines:
        assert ray.get(engine.__ray_call__.remote(lambda self: len(self.token_versions._stamps)), timeout=30) == 0


def test_versions_lie_along_the_responses_of_several_turns():
    tokens = [9, 9, 1, 2, 3, 8, 8, 4, 5]
    sampled = [([1, 2, 3], [7, 7, 8]), ([6], [8]), ([4, 5], [8, 9])]  # the agent dropped the second answer
    assert along(tokens, [(2, 5), (7, 9)], sampled) == [-1, -1, 7, 7, 8, -1, -1, 8, 9]
    # An agent that rewrote what was sampled: nobody's version, and the next turn's all the same.
    assert along([9, 1, 2, 8, 4], [(1, 3), (4, 5)], [([1, 3], [7, 7]), ([4], [8])]) == [-1, -1, -1, -1, 8]
