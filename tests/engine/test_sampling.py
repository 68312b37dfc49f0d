"""What a response carries, and which requests are refused."""

import pytest
import ray
import torch
from vllm import SamplingParams

from . import tiny


def test_responses_are_stamped_and_always_carry_log_probs(qwen3):
    qwen3.publish()
    engine = qwen3.engines[1]
    params = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=1)  # as OpenRLHF without correction: no logprobs
    responses = ray.get(
        engine.generate_responses.remote("ab c", "label", params, 64, tiny.tokenizer(), num_samples=3), timeout=60
    )
    assert len(responses) == 3
    for response in responses:
        assert response["weight_version"] == qwen3.version
        sampled = [version for i, version in enumerate(response["weight_versions"]) if i >= response["action_ranges"][0][0]]
        assert set(sampled) == {qwen3.version} and len(response["weight_versions"]) == len(response["observation_tokens"])
        start, end = response["action_ranges"][0]
        log_probs = torch.tensor(response["rollout_log_probs"])
        assert len(log_probs) == end == len(response["observation_tokens"])
        mine = qwen3.learner.log_probs(response["observation_tokens"])[start - 1 :]
        assert (log_probs[start:] - mine).abs().max() < 1e-3


def test_min_tokens_does_not_mask_the_end_of_sequence(qwen3):
    head = qwen3.learner.model.lm_head.weight
    eos = qwen3.learner.model.config.eos_token_id
    old = head.detach().clone()
    with torch.no_grad():
        head[eos] *= 4  # now and then the likeliest token
    qwen3.publish()
    params = SamplingParams(temperature=1.0, max_tokens=1, min_tokens=1, seed=0)
    prompts = [[i, 7, 9 + i] for i in range(3, 60)]
    outputs = ray.get([qwen3.engines[0].generate.remote(prompt, params) for prompt in prompts], timeout=60)
    sampled = [output.outputs[0].token_ids[0] for output in outputs]
    theirs = torch.tensor([o.outputs[0].logprobs[0][t].logprob for o, t in zip(outputs, sampled, strict=True)])
    mine = torch.stack([qwen3.learner.log_probs([*p, t])[-1] for p, t in zip(prompts, sampled, strict=True)])
    with torch.no_grad():
        head.copy_(old)
    assert eos in sampled
    assert (theirs - mine).abs().max() < 1e-3


def test_stop_strings_end_a_response_and_belong_to_it(qwen2):
    qwen2.publish()
    tokenizer = tiny.tokenizer()
    params = SamplingParams(temperature=1.0, max_tokens=300, seed=5, skip_special_tokens=False)
    outputs = ray.get([qwen2.engines[0].generate.remote([i, 9], params) for i in range(3, 11)], timeout=120)
    stopped = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    stopped = [output for output in stopped if output.token_ids[-1] != tokenizer.eos_token_id]
    texts = [tokenizer.decode(output.token_ids) for output in stopped]
    assert texts and texts == [output.text for output in stopped]
    assert all(text.endswith("e") and text.count("e") == 1 for text in texts)


def test_longer_stop_strings_belong_to_the_text_and_the_end_of_sequence_does_not(qwen3):
    tokenizer, head = tiny.tokenizer(), qwen3.learner.model.lm_head.weight
    eos = tokenizer.eos_token_id
    old = head.detach().clone()
    with torch.no_grad():
        head[eos] *= 2  # now and then the likeliest token
    qwen3.publish()

    def sampled(stop: list[str]) -> list:
        def set_stop(actor) -> None:
            actor.stop = stop

        ray.get(qwen3.engines[0].__ray_call__.remote(set_stop), timeout=30)
        params = SamplingParams(temperature=1.0, max_tokens=150, seed=5, skip_special_tokens=False)
        outputs = ray.get([qwen3.engines[0].generate.remote([i, 9], params) for i in range(3, 19)], timeout=120)
        return [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]

    try:
        texts = [tokenizer.decode(output.token_ids) for output in sampled([])]
        texts = [text[i : i + 2] for text in texts for i in range(len(text) - 7)]
        pairs = [text for text in texts if text.isascii() and text.isalnum() and text not in "<unk><eos><pad>"][:3]
        stopped = sampled(pairs)
    finally:
        with torch.no_grad():
            head.copy_(old)
        sampled([])
    by_eos = [output for output in stopped if output.token_ids[-1] == eos]
    assert by_eos and len(by_eos) < len(stopped)
    for output in stopped:
        text = tokenizer.decode([token for token in output.token_ids if token != eos])
        assert output.text == (text.rstrip("\ufffd") if output in by_eos else text)  # half a character is none of the text
        assert (output.text[-2:] in pairs) == (output not in by_eos)


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}])
def test_truncated_sampling_is_refused(qwen3, truncation):
    qwen3.publish()
    with pytest.raises(ValueError, match="top_p 1.0 and top_k -1"):
        ray.get(qwen3.engines[0].generate.remote([5, 6], SamplingParams(max_tokens=2, **truncation)), timeout=30)
