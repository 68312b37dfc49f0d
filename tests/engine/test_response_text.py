"""Text made once is the text that vLLM makes token by token."""

from random import Random
from types import SimpleNamespace

import pytest
import ray
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from qarl_openrlhf.data.byte_tokenizer import byte_tokenizer
from qarl_openrlhf.engine.response_text import response_text
from qarl_openrlhf.engine.stops import as_tokens
from tests.tiny_models import make_tokenizer

from . import tiny

TEXTS = ["3 + 4 = 7", "ünïcödé → 数学", "  two\t\n", "🙂🙂", ""]


def one_by_one(tokenizer, prompt, ids, finish_reason, params) -> str:
    request = SimpleNamespace(
        request_id="", external_req_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=params
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    for i, token in enumerate(ids):
        detokenizer.update([token], finish_reason == "stop" and i == len(ids) - 1)
    return detokenizer.get_next_output_text(finished=True, delta=False)


def slow_tokenizer():
    """One without a backend in Rust: vLLM detokenizes it in Python."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@pytest.mark.parametrize("make", [tiny.tokenizer, byte_tokenizer, slow_tokenizer], ids=["words", "bytes", "slow"])
@pytest.mark.parametrize("special", [True, False])
def test_any_tokens_and_any_end(make, special):
    tokenizer, random = make(), Random(0)
    params = SamplingParams(skip_special_tokens=special)
    written = [tokenizer(text)["input_ids"] for text in TEXTS]
    drawn = [[random.randrange(len(tokenizer)) for _ in range(length)] for length in (1, 2, 7, 40, 300)]
    prompt = tokenizer("a prompt é")["input_ids"][:-1]  # of bytes: it ends within a character
    for ids in [*written, *drawn, [*written[0], tokenizer.eos_token_id]]:
        for reason in ("stop", "length"):
            output = SimpleNamespace(token_ids=ids, finish_reason=reason)
            assert response_text(tokenizer, prompt, output, params) == one_by_one(tokenizer, prompt, ids, reason, params)


@pytest.mark.parametrize(
    ("stop", "written", "text"),
    [("+", "12 + 3", "12 +"), ("+", "12<|im_end|>", "12"), ("|", "12<|im_end|>", "12"), ("u", "1 sum", "1 sum")],
)
def test_the_whole_token_that_a_stop_character_ends_with_belongs_to_the_text(stop, written, text):
    tokenizer = make_tokenizer()
    _, stops = as_tokens([stop], tokenizer, SimpleNamespace(try_get_generation_config=lambda: {}))
    ids = tokenizer(written)["input_ids"]
    end = next(i for i, token in enumerate(ids) if token in (*stops, tokenizer.eos_token_id))
    assert len(tokenizer.decode(ids[end])) > 1  # else no token would be longer than the stop string
    output = SimpleNamespace(token_ids=ids[: end + 1], finish_reason="stop", stop_reason=None)
    params = SamplingParams(skip_special_tokens=False)
    assert response_text(tokenizer, [5], output, params, stops) == text


def test_an_engine_gives_text_where_it_was_asked_for(qwen3):
    qwen3.publish()
    tokenizer, engine = tiny.tokenizer(), qwen3.engines[0]
    params = [SamplingParams(temperature=1.0, max_tokens=40, seed=4, detokenize=wanted) for wanted in (True, False)]
    calls = [engine.generate.remote([5, 6, 7], some) for some in params]
    with_text, without = (output.outputs[0] for output in ray.get(calls, timeout=60))
    assert with_text.token_ids == without.token_ids and without.text == ""
    ids = [token for token in with_text.token_ids if token != tokenizer.eos_token_id]
    assert with_text.text == tokenizer.decode(ids, skip_special_tokens=True) != ""
    for output in (with_text, without):  # one a token, whatever holds them
        assert len(output.logprobs) == len(output.token_ids) and all(t in step for step, t in zip(output.logprobs, output.token_ids))
