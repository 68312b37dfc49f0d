"""What an engine's process has imported."""

import sys

import ray


def test_an_engine_imports_nothing_that_trains(qwen3):
    qwen3.publish()
    wanted = ("vllm", "deepspeed", "openrlhf.models", "peft", "datasets", "transformers.trainer")
    found = qwen3.engines[0].__ray_call__.remote(lambda _: [name for name in wanted if name in sys.modules])
    assert ray.get(found, timeout=60) == ["vllm"]
