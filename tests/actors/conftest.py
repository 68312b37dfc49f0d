import os
import socket

import pytest
import torch

from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def one_rank():
    """The environment of a world of one: DeepSpeed on gloo, in this process."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.set_num_threads(1)


def learner_args(model: str, **flags):
    """Resolved arguments of a learner on the model in a directory. flags: with "__" for "."; None leaves one out."""
    from qarl_openrlhf.cli import train_qarl
    from tests.e2e.conftest import argv

    wanted = {
        "device": "cpu",
        "actor.model_name_or_path": model,
        "data.prompt_dataset": "none.jsonl",
        "reward.remote_url": "none.py",
        "vllm.num_engines": 1,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "algo.advantage.estimator": "group_norm",
        "rollout.n_samples_per_prompt": 4,
        "rollout.batch_size": 4,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "quant.scheme": "w4a16:g32",
        "objective.name": "tbpo",
    } | {name.replace("__", "."): value for name, value in flags.items()}
    return train_qarl.resolve(argv({k: v for k, v in wanted.items() if v is not None}))[0]


def build_critic(args):
    """A critic's Ray actor, in this process and in the world that it already has."""
    from qarl_openrlhf.actors.model_workers import CriticModelActor
    from qarl_openrlhf.actors.strategy import make_strategy

    actor = CriticModelActor.__new__(CriticModelActor)
    actor.strategy = strategy = make_strategy(args)
    actor._setup_distributed = lambda strategy: strategy.setup_distributed()
    actor.init_model_from_pretrained(strategy, args.critic.model_name_or_path, 100)
    return actor


def build_learner(model: str, **flags):
    """A ``QarlActorTrainer`` without engines, with ``learner_args``, built as the Ray actor builds it."""
    from qarl_openrlhf import patches

    patches.apply()
    from openrlhf.models import Actor

    from qarl_openrlhf.actors.learner import QarlActorTrainer
    from qarl_openrlhf.actors.strategy import make_strategy

    args = learner_args(model, **flags)
    strategy = make_strategy(args)
    strategy.setup_distributed()
    actor = Actor(
        model,
        attn_implementation=args.ds.attn_implementation,
        packing_samples=args.ds.packing_samples,
        ds_config=strategy.get_ds_train_config(),
        temperature=args.rollout.temperature,
    )
    if args.actor.gradient_checkpointing_enable:
        actor.gradient_checkpointing_enable()
    config = dict(
        optim=args.actor.optim,
        muon=vars(args.actor.muon),
        adam=vars(args.actor.adam),
        lr_scheduler="constant",
        lr_warmup_ratio=0.0,
        min_lr_ratio=0.1,
        max_norm=1.0,
        scheduler_steps=100,
    )
    actor, optimizer, scheduler = strategy.prepare((actor, config))
    return QarlActorTrainer(
        strategy, actor, None, optimizer, scheduler, micro_train_batch_size=args.train.micro_batch_size, vllm_engines=None
    )


@pytest.fixture(scope="session")
def make_learner(one_rank, tmp_path_factory):
    """``build_learner`` on a tiny model of a family, in this process."""
    models = {}

    def make(family="llama", *, tied=False, **flags):
        key = (family, tied)
        if key not in models:
            models[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, hidden=128, tied=tied)
        return build_learner(models[key], **flags)

    return make


def make_rollout(seed=0, count=16) -> list:
    """Responses of different prompt and response lengths, with log-probs of a sampler that is 0.1 nats away."""
    from qarl_openrlhf import patches

    patches.apply()
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(seed)
    items = []
    for i in range(count):
        prompt, response = 5 + 3 * (i % 4), 3 + 2 * (i % 5)
        length = prompt + response
        action_mask = torch.zeros(1, length - 1, dtype=torch.long)
        action_mask[0, prompt - 1 :] = 1
        items.append(
            Experience(
                sequences=torch.randint(4, 500, (1, length), generator=generator),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                action_mask=action_mask,
                rollout_log_probs=-6 + 0.1 * torch.randn(1, length - 1, generator=generator),
                advantages=torch.full((1, length - 1), 1.0 if i % 2 else -1.0),
                rewards=torch.tensor([float(i % 2)]),
                total_length=torch.tensor([float(length)]),
                response_length=torch.tensor([response]),
                truncated=torch.tensor([False]),
                prompts=["p"],
                labels=["l"],
                info={"reward": torch.tensor([float(i % 2)])},
            )
        )
    return items


@pytest.fixture
def rollout():
    """:func:`make_rollout`: 16 responses."""
    return make_rollout
