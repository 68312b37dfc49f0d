"""The response is found behind any prompt, as OpenRLHF decodes the two: whole or cut, composed or not."""

import importlib.util
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qarl_openrlhf.rewards import math as math_reward
from qarl_openrlhf.rewards.answers import LEAST_PROMPT, response_of


def tokenizer(normalizer=None) -> PreTrainedTokenizerFast:
    """One token a byte, as tokenizers of Qwen2, 2.5 and 3 treat what they have not merged; theirs normalize by NFC."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=["<think>"])


TOKENIZERS = {"as they are": tokenizer(), "NFC": tokenizer(normalizers.NFC()), "NFD": tokenizer(normalizers.NFD())}


def decoded(of: PreTrainedTokenizerFast, prompt: str, response: str, kept: int | None = None) -> str:
    """As `SingleTurnAgentExecutor` makes the text, where a prompt has room for `kept` tokens. A response's characters are the model's
    own: no normalizer sees them."""
    ids = of(prompt, add_special_tokens=False)["input_ids"]
    ids = ids if kept is None else ids[-kept:]
    return of.decode(ids + TOKENIZERS["as they are"](response, add_special_tokens=False)["input_ids"], skip_special_tokens=False)


# Characters that change or move under normal forms: compatibility signs, marks that compose or are reordered, Hangul, and what a
# mark composes with, a special token's last character included.
UNSTABLE = list("\u2126\u212a\u212b\u0344\u0958\uac01\u1100\u1161\u11a8\U0001d15e=<>aeo \n\u00e9\u1e0b\u0338\u0323\u0307\u0301\u0308\u0327\u0345\ufffd")
TEXT = st.lists(st.one_of(st.sampled_from([*UNSTABLE, "<think>", "<|im_end|>"]), st.characters(codec="utf-8")), max_size=40).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(prompt=TEXT, response=TEXT)
@example("A resistor of 5 \u2126 carries 2 A.", " 10 V")
@example("x =\u0338 1, cafe\u0301", "\u0327 marks that follow a mark")
@example("<think>\u0338", "a mark behind a special token, which no normalizer composes it with")
def test_behind_a_whole_prompt(name, prompt, response):
    assert response_of(decoded(TOKENIZERS[name], prompt, response), prompt) == response


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(start=TEXT, end=TEXT, response=TEXT, left=st.integers(1, 200))
@example("\u2126" * 9, "put it in \\boxed{}: cafe\u0301", "\u0327 10", 40)
def test_behind_a_prompt_cut_anywhere(name, start, end, response, left):
    """Cut within a character, too, or between marks that compose. The digits make every end of the prompt its only one."""
    prompt = start + end + "".join(f"{i}," for i in range(LEAST_PROMPT)) + end
    tokens = len(TOKENIZERS[name](prompt, add_special_tokens=False)["input_ids"])
    least = len(TOKENIZERS[name]("".join(f"{i}," for i in range(LEAST_PROMPT)) + end, add_special_tokens=False)["input_ids"])
    assert response_of(decoded(TOKENIZERS[name], prompt, response, max(least, min(left, tokens))), prompt) == response


def test_the_longest_end_counts():
    prompt = "What is 12 + 12 + 12 + 12 + 12 ="
    for cut in range(1, len(prompt) - LEAST_PROMPT):
        assert response_of(prompt[cut:] + " 60", prompt) == " 60"


@pytest.mark.parametrize(
    "query", ["\nThe answer is 9", "9", "", "=" * (LEAST_PROMPT - 1) + "9", "\u0338" * 20, "\ufffd" * 20, "WHAT IS 4 + 5? " + "=" * 20]
)
def test_a_few_characters_are_no_prompt(query):
    prompt = "\u2126 What is 4 + 5? \n" + "=" * 20 + "\n"
    with pytest.raises(ValueError, match="not at the beginning of the decoded text.*tokenizer that decodes prompts as they were"):
        response_of(query, prompt)


@pytest.mark.parametrize("unit", ["a", "ab", "\u2126", "a\u0323\u0307", "aaaaaaab"])
def test_it_takes_linear_time(unit):
    """It runs in the engine's own process, where a slow search would hold up all other requests."""
    prompt = unit * (400_000 // len(unit)) + "!"
    began = time.process_time()
    assert response_of(prompt[len(prompt) // 2 // len(unit) * len(unit) :] + " 9", prompt) == " 9"
    assert time.process_time() - began < 10


def test_the_reward_of_a_prompt_that_the_tokenizer_composes():
    prompt = "A resistor of 5 \u2126 carries 2 A. What is the voltage?\nPut it in \\boxed{}."
    query = decoded(TOKENIZERS["NFC"], prompt, " It is \\boxed{10}<|im_end|>")
    assert prompt not in query
    assert math_reward.make_reward(timeout=20.0)([query], [prompt], ["10"])["rewards"] == 1.0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_reward_of_the_alignment_measurement_counts_the_response_alone(name):
    path = Path(__file__).parents[2] / "benchmarks" / "mismatch_reward.py"
    spec = importlib.util.spec_from_file_location("mismatch_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = "eeee \u2126 eeee"
    assert module.reward_func([decoded(TOKENIZERS[name], prompt, " be a sea")], [prompt], [""])["rewards"] == 2 / 6
