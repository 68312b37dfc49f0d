import json
import os

import pytest

from tests.tiny_models import save_tiny_model

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny random model, made once a session: ``tiny_model("qwen3", tied=True)``."""
    made = {}

    def get(family: str, **options) -> str:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(family), family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> str:
    return write_prompts(tmp_path_factory.mktemp("data"))


def write_prompts(directory) -> str:
    path = os.path.join(directory, "prompts.jsonl")
    with open(path, "w") as file:
        for i in range(64):
            file.write(json.dumps({"input": f"{i} + {i % 7} = " * (1 + i % 3), "label": str(i + i % 7)}) + "\n")
    return path


@pytest.fixture
def flags(tmp_path, prompts):
    """Flags of a two-step run on a tiny model, as a dict to change: ``argv(flags("dir") | {...})``."""
    return lambda model, name="run": two_steps(model, prompts, str(tmp_path / name))


def two_steps(model: str, prompts: str, out: str) -> dict:
    return {
        "device": "cpu",
        "actor.model_name_or_path": model,
        "reward.remote_url": os.path.join(HERE, "tiny_reward.py"),
        "data.prompt_dataset": prompts,
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": 64,
        "data.max_samples": 8,
        "rollout.max_new_tokens": 12,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "algo.advantage.estimator": "group_norm",
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.1,
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "ds.zero_stage": 2,
        "ckpt.output_dir": out,
        "ckpt.path": os.path.join(out, "ckpt"),
    }


def argv(flags: dict) -> list[str]:
    """{"vllm.num_engines": 1, "train.colocate_all": True} -> command line; False leaves a switch out."""
    words = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, (list, tuple)):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words
