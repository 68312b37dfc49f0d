"""How many responses an engine samples at a time: all of its own, as far as its KV cache holds them."""

import json

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.cli.dry_run import _planned
from qarl_openrlhf.planning import memory
from qarl_openrlhf.planning.parts import GIB
from qarl_openrlhf.planning.positions import load_config

from .test_recipes import CONFIGS, command_of

README = ["--data.max_len", "4096", "--rollout.max_new_tokens", "3072", "--rollout.batch_size", "128", "--train.batch_size", "128"]


def places(*flags: str) -> int | None:
    args, notes, _ = train_qarl.resolve([*command_of("qwen3_8b", "qarl", QARL_PLACE="apart"), *flags])
    found = json.loads(args.vllm.engine_args).get("max_num_seqs")
    assert any(f"max_num_seqs {found}" in note for note in notes) is (found is not None and "--vllm.engine_args" not in flags)
    return found


def test_as_many_as_a_rollout_has():
    assert places(*README) == 256  # 128 prompts x 8 responses on four engines
    larger = ["--rollout.batch_size", "512", "--data.max_len", "2048", "--rollout.max_new_tokens", "1024"]
    assert places(*README, *larger) == 512  # of 1,024: more would be bound by arithmetic
    assert places(*README, "--rollout.batch_size", "64") is None  # 128 responses: vLLM's own number


def test_no_more_than_the_cache_holds():
    """The paper's 18,432 tokens; and a cache that holds 200 responses of a quarter of the longest length."""
    assert places() is None
    each = 2 * 2 * 36 * 8 * 128 * 4096  # layers, heads of keys and values, features, tokens
    fixed = 200 * each // 4 + (200 - 128) * memory.SAMPLED * 151936
    given = json.dumps({"kv_cache_memory_bytes": fixed})
    args, _, _ = train_qarl.resolve([*command_of("qwen3_8b", "qarl", QARL_PLACE="apart"), *README, "--vllm.engine_args", given])
    assert json.loads(args.vllm.engine_args) == {"kv_cache_memory_bytes": fixed, "max_num_seqs": 200}


def test_the_users_number_stays():
    assert places(*README, "--vllm.engine_args", '{"max_num_seqs": 64}') == 64


def test_their_logits_are_counted():
    parts = {}
    for count in (64, 128, 512):
        args, _, _ = train_qarl.resolve([*command_of("qwen3_8b", "qarl"), "--vllm.engine_args", json.dumps({"max_num_seqs": count})])
        config = load_config(args)
        one = memory.estimate(args, memory.ModelShape.of(*_planned(args, config), config))[0]
        parts[count] = next(part.bytes for part in one.parts if part.name == "engine working memory")
    assert parts[64] == parts[128] == 2 * GIB and parts[512] == 2 * GIB + 384 * 40 * 151936


def test_a_cpu_and_an_unknown_card_choose_nothing():
    cpu = ["--device", "cpu", "--data.prompt_dataset", "none.jsonl", "--reward.remote_url", "none.py", "--vllm.num_engines", "1"]
    args, _, _ = train_qarl.resolve(["--actor.model_name_or_path", str(CONFIGS / "qwen3-8b"), *cpu, "--rollout.batch_size", "256"])
    assert args.vllm.engine_args == "{}"
