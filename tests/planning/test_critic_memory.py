"""A critic in the memory estimate: on the policy's GPUs, on its own, and in the main memory of a CPU."""

from types import SimpleNamespace as N

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_openrlhf.cli import dry_run
from qarl_openrlhf.cli.dry_run import _critic_shape
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning import learner_memory, memory
from qarl_openrlhf.planning.host_memory import PROCESS, host_parts
from qarl_openrlhf.planning.model_shape import layer_activations
from qarl_openrlhf.planning.positions import load_config
from tests.tiny_models import save_tiny_model

from .test_memory import apart, shape_8b

CRITIC = N(model_name_or_path="critic", num_nodes=1, num_gpus_per_node=4, optim="adam", adam=N(state_bits=32), muon=N())


def with_critic(**changes):
    args = apart(train__colocate_critic_reward=False, **changes)
    args.critic = CRITIC
    return args


def by_name(estimate) -> dict:
    return {part.name: part for part in estimate.parts}


def alone(args, shape):
    one = learner_memory.critic(args, shape, memory.PHASES)
    rest = sum(part.bytes for part in one.parts if part.phases == memory.PHASES)
    return one, rest


def test_a_critic_on_gpus_of_its_own_is_a_kind_of_gpu():
    args, shape = with_critic(), shape_8b("bf16")
    learner, critic, engine = memory.estimate(args, shape_8b("w4a16"), shape)
    assert [one.role for one in (learner, critic, engine)] == ["each learner GPU", "each critic GPU", "each engine GPU"]
    p, parts = shape.parameters, by_name(critic)
    assert parts["BF16 parameters"].bytes == int(2 * p / 4) and parts["master weights (FP32)"].bytes == int(4 * p / 4)
    assert parts["optimizer state"].bytes == int(8 * p / 4)
    assert not any("quantization" in name or "logits" in name or "sync" in name or "lm_head" in name for name in parts)
    assert memory.estimate(apart(), shape_8b("w4a16"))[0].total("layers") == learner.total("layers")


def test_its_own_gpus_and_optimizer_count():
    args = with_critic()
    args.critic = N(**vars(CRITIC) | {"num_gpus_per_node": 1, "adam": N(state_bits=8)})
    shape = shape_8b("bf16")
    parts = by_name(memory.estimate(args, shape_8b("w4a16"), shape)[1])
    assert parts["BF16 parameters"].bytes == 2 * shape.parameters
    assert parts["optimizer state (8 bits)"].bytes == pytest.approx(2 * shape.parameters, rel=0.02)


def test_on_the_policys_gpus_both_train_at_the_same_time():
    args, shape = with_critic(train__colocate_all=True, train__async_enable=True), shape_8b("bf16")
    without = memory.estimate(apart(train__colocate_all=True, train__async_enable=True), shape_8b("w4a16"))[0]
    learner, engine = memory.estimate(args, shape_8b("w4a16"), shape)
    critic, rest = alone(args, shape)
    assert learner.role == "each learner GPU (policy and critic)" and memory.CRITIC not in learner.phases
    context = memory.CONTEXT
    for phase in ("rollout", "publish"):
        assert learner.total(phase) - without.total(phase) == rest + context
    for phase in memory.TRAINING:
        assert learner.total(phase) - without.total(phase) == critic.total(critic.peak) + context


def test_where_they_sleep_a_critic_takes_its_turn_before_the_policy():
    both = {"train__colocate_all": True, "ds__enable_sleep": True, "vllm__enable_sleep": True}
    args, shape = with_critic(**both), shape_8b("bf16")
    (without,) = memory.estimate(apart(**both), shape_8b("w4a16"))
    (one,) = memory.estimate(args, shape_8b("w4a16"), shape)
    critic, rest = alone(args, shape)
    assert one.role == "each GPU (learner, critic and engine)" and one.phases[-1] == memory.CRITIC
    for phase in memory.PHASES:  # its states are in main memory
        assert one.total(phase) - without.total(phase) == rest + memory.CONTEXT
    always = sum(part.bytes for part in without.parts if part.phases == memory.PHASES)
    assert one.total(memory.CRITIC) == always + critic.total(critic.peak) + memory.CONTEXT
    assert one.host - without.host == critic.host > 0


def test_one_that_does_not_fit_is_named_with_what_helps():
    args = with_critic(ds__zero_stage=2)
    critic = memory.estimate(args, shape_8b("w4a16"), shape_8b("bf16"))[1]
    problem = critic.problem(40 * memory.GIB)
    assert problem.startswith("each critic GPU needs about") and "--ds.zero_stage 3" in problem


def test_its_model_has_no_lm_head_and_a_missing_one_is_named(tmp_path, monkeypatch):
    path = save_tiny_model(tmp_path / "m", "qwen3", hidden=128)
    args = N(actor=N(model_name_or_path="other"), critic=N(model_name_or_path=path), model=N(max_positions=None, rope_theta=None))
    config = AutoConfig.from_pretrained(path)
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    policy = shape_8b("bf16")
    assert _critic_shape(args, policy).parameters == whole - head
    with monkeypatch.context() as patch:  # a model of another kind counts as the policy's, not as nothing
        patch.setattr(dry_run, "_known", lambda *_: None)
        assert _critic_shape(args, policy) is policy
    args.critic.model_name_or_path = None
    assert _critic_shape(args, policy) is None
    args.critic.model_name_or_path = "/no/such"
    with pytest.raises(ConfigError, match="--critic.model_name_or_path /no/such is not a directory"):
        _critic_shape(args, policy)


def test_on_a_cpu_a_critic_counts_with_its_optimizer(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    args, shape = with_critic(actor__num_gpus_per_node=1), shape_8b("bf16")
    args.critic = N(**vars(CRITIC) | {"num_gpus_per_node": 2})
    parts = {part.name: part.bytes for part in host_parts(args, shape, shape)}
    without = {part.name: part.bytes for part in host_parts(args, shape)}
    assert parts.keys() - without.keys() == {"critic"} and all(parts[name] == size for name, size in without.items())
    tokens = 2 * learner_memory.micro_batch_tokens(args)
    expected = 2 * PROCESS + 2 * shape.parameters + 18 * shape.parameters + 2 * layer_activations(shape, tokens)
    assert parts["critic"] == expected



def test_overrides_of_positions_are_the_policys_and_of_a_critic_from_the_same_model(tmp_path):
    same, other = (save_tiny_model(tmp_path / name, "qwen3", hidden=128) for name in ("same", "other"))
    longer = AutoConfig.from_pretrained(same).max_position_embeddings * 2
    args = N(actor=N(model_name_or_path=same), critic=N(model_name_or_path=same), model=N(max_positions=longer, rope_theta=None))
    assert [load_config(args, role).max_position_embeddings for role in ("actor", "critic")] == [longer, longer]
    args.critic.model_name_or_path = other
    assert load_config(args, "critic").max_position_embeddings == longer // 2
