"""Prompts that are too long for a run are told before it starts, in the tokens that the engine gets."""

import json
from types import SimpleNamespace as N

import pytest
from tokenizers import normalizers

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.prompt_lengths import long_prompts
from qarl_openrlhf.rewards import math, reasoning_gym
from tests.tiny_models import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def arguments(model: str, path, **data) -> N:
    given = {"prompt_dataset": str(path), "input_key": "input", "input_template": None, "apply_chat_template": False, "max_len": 24}
    args = N(data=N(**(given | data)), rollout=N(max_new_tokens=8), actor=N(model_name_or_path=model))
    args.reward, args.train = N(remote_url=None), N(agent_func_path=None)
    return args


def written(path, *prompts) -> str:
    path.write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts))
    return str(path)


def tokens(prompt: str) -> int:
    return len(make_tokenizer()(prompt, add_special_tokens=False)["input_ids"])


def test_long_prompts_are_counted_and_the_longest_is_named(model, tmp_path):
    long = "one two three four " * 8
    assert tokens("a b") <= 16 < tokens(long)
    path = written(tmp_path / "some.jsonl", "a b", long, "a b")
    (note,) = long_prompts(arguments(model, path))
    assert note.startswith(f"1 of the first 3 prompts of --data.prompt_dataset {path} are longer than 16 tokens (--data.max_len 24 less")
    assert f"the longest {tokens(long)}: their beginning is cut off" in note and "Raise --data.max_len" in note
    assert long_prompts(arguments(model, path, max_len=tokens(long) + 8)) == []
    with pytest.raises(ConfigError, match="2 of the first 2 prompts .* raise --data.max_len"):
        long_prompts(arguments(model, written(tmp_path / "all.jsonl", long, long)))


def test_the_template_counts_and_what_is_not_a_local_file_does_not(model, tmp_path):
    path = written(tmp_path / "some.jsonl", "a b", "a b")
    template = "x " * 12 + "{}"
    assert tokens(template.format("a b")) > 16
    with pytest.raises(ConfigError, match="2 of the first 2"):
        long_prompts(arguments(model, path, input_template=template))
    assert long_prompts(arguments(model, f"{path},org/a_set,{tmp_path},https://host/p.jsonl")) == []
    written(tmp_path / "more.jsonl", "one two three four " * 8)
    (note,) = long_prompts(arguments(model, f"{tmp_path}/*.jsonl"))
    assert note.startswith(f"1 of the first 3 prompts of --data.prompt_dataset {tmp_path}/*.jsonl are longer")
    assert long_prompts(arguments("org/model", path, max_len=1)) == []


def test_a_template_that_refuses_the_prompts_is_named(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('users only') }}"
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="some.jsonl: the model's chat template does not take these prompts: users only"):
        long_prompts(arguments(str(tmp_path / "model"), written(tmp_path / "some.jsonl", "a b"), apply_chat_template=True))


@pytest.mark.parametrize("reward", [math.__file__, reasoning_gym.__file__])
def test_prompts_that_a_reward_of_ours_would_not_know_again(tmp_path, reward):
    path = written(tmp_path / "some.jsonl", "a b", "caf\u00e9 of 5 \u2126")
    for normalizer, change in (("NFC", None), ("NFKC", None), ("NFD", None), ("Lowercase", "'\u03c9' of '\u03a9'"), ("StripAccents", "'e of 5 ")):
        tokenizer = make_tokenizer()
        accents = [normalizers.NFD()] if normalizer == "StripAccents" else []
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*accents, getattr(normalizers, normalizer)()])
        tokenizer.save_pretrained(tmp_path / normalizer)
        args = arguments(str(tmp_path / normalizer), path, max_len=100)
        assert long_prompts(args) == []  # no reward of ours
        args.reward.remote_url = [reward]
        if change is None:
            assert long_prompts(args) == []
        else:
            with pytest.raises(ConfigError, match=f"some.jsonl, prompt 2: the tokenizer of .*{change}.*--reward.remote_url"):
                long_prompts(args)
            args.train.agent_func_path = "agent.py"  # which takes the reward's place
            assert long_prompts(args) == []


def test_a_reward_of_ours_through_a_link(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").symlink_to(math.__file__)
    args = arguments(str(tmp_path / "model"), written(tmp_path / "some.jsonl", "A b"), max_len=100)
    args.reward.remote_url = [str(tmp_path / "reward.py")]
    with pytest.raises(ConfigError, match="prompt 1: .*it makes 'a b' of 'A b'"):
        long_prompts(args)
