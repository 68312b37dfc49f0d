"""GPUs and batches that do not add up are refused before anything starts."""

from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.placement import check_placement


def arguments(**changes) -> N:
    """A run on 8 shared GPUs; changes: dotted names with __ for the dot."""
    group = {"num_nodes": 1, "num_gpus_per_node": 8}
    args = N(
        actor=N(**group), ref=N(**group), critic=N(**group, model_name_or_path=None), vllm=N(num_engines=8, tensor_parallel_size=1),
        train=N(colocate_all=True, colocate_actor_ref=False, colocate_critic_reward=False, async_enable=False,
            batch_size=64, micro_batch_size=4, dynamic_batch_enable=False),
        algo=N(kl=N(init_coef=0.0)), rollout=N(batch_size=16, n_samples_per_prompt=8),
    )  # fmt: skip
    for name, value in changes.items():
        *path, last = name.split("__")
        node = args
        for step in path:
            node = getattr(node, step)
        setattr(node, last, value)
    return args


CRITIC = {"critic__model_name_or_path": "some/model"}
APART = CRITIC | {"train__colocate_all": False}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vllm__num_engines": 4, "vllm__tensor_parallel_size": 2},
        {"vllm__num_engines": 3, "train__async_enable": True},
        {"vllm__num_engines": 3, "train__colocate_all": False},
        {"train__batch_size": 60, "train__dynamic_batch_enable": True},
        {"critic__num_gpus_per_node": 5},  # of a run without a critic
        APART | {"critic__num_gpus_per_node": 4},
        APART | {"critic__num_gpus_per_node": 3, "train__batch_size": 96},
        CRITIC | {"critic__num_gpus_per_node": 4},
        CRITIC | {"critic__num_gpus_per_node": 16, "train__colocate_critic_reward": True},
    ],
)
def test_what_works(changes):
    check_placement(arguments(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vllm__num_engines": 4}, "use --vllm.num_engines 8"),
        ({"vllm__tensor_parallel_size": 3}, "a TP that divides 8"),
        ({"algo__kl__init_coef": 0.01, "ref__num_gpus_per_node": 4}, "--ref.num_gpus_per_node to 1 and 8"),
        ({"train__batch_size": 60}, "use 32"),
        ({"train__batch_size": 16}, "use 32"),
        ({"train__batch_size": 256}, "nothing would be trained; use --train.batch_size 128 or less"),
        ({"train__batch_size": 4, "train__dynamic_batch_enable": True}, "8 GPUs .--actor.num_nodes x --actor.num_gpus_per_node. .* use a multiple of 8"),
        (APART | {"critic__num_gpus_per_node": 3}, "on 3 GPUs .--critic.num_nodes x --critic.num_gpus_per_node., .* use 96"),
        (APART | {"critic__num_gpus_per_node": 3, "train__batch_size": 108}, "on 8 GPUs .--actor.num_nodes x --actor.num_gpus_per_node., .* use 96"),
        (APART | {"critic__num_nodes": 2, "train__batch_size": 96}, "on 16 GPUs .--critic.num_nodes x .* use 64"),
        (
            APART | {"actor__num_gpus_per_node": 1, "train__batch_size": 4, "train__dynamic_batch_enable": True},
            "leaves some of 8 GPUs .--critic.num_nodes x --critic.num_gpus_per_node. without a sample: use a multiple of 8",
        ),
        (CRITIC | {"critic__num_gpus_per_node": 16}, "the critic's 16 processes do not fit on: set .* to 1 and 8"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_placement(arguments(**changes))
