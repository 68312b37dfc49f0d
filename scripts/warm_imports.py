"""Imports what a run and its tests import, so that it is compiled once: setup_env.sh runs this without
PYTHONDONTWRITEBYTECODE, which most container images set. Without kept bytecode every process of every run compiles 7,000
modules anew, 12 to 18 s of CPU each (policy actor 24 -> 10 s, engine 30 -> 12 s); a run has five.

It is also the first sign that the environment works: what cannot be imported here ends set-up with its error.
"""

import compileall
import importlib
import sysconfig
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

MODULES = (
    "qarl_openrlhf.actors.policy",
    "qarl_openrlhf.actors.trainer",
    "qarl_openrlhf.actors.install",
    "qarl_openrlhf.engine.actor",
    "qarl_openrlhf.engine.extension",
    "qarl_openrlhf.sync.receiver",
    "qarl_openrlhf.report",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "reasoning_gym",
    "matplotlib.pyplot",
    "pytest",
    "hypothesis",
    "ray.dashboard.dashboard",
    "ray.dashboard.agent",
    "ray._private.log_monitor",
    "ray.autoscaler._private.monitor",
)

# Processes at work import more than the modules above do, an engine's and Ray's own: most of it is in these directories.
DIRECTORIES = (
    "aiohttp", "aiohttp_cors", "anyio", "compressed_tensors", "fastapi", "google/protobuf", "loguru", "opencensus", "platformdirs",
    "pydantic", "python_multipart", "ray/_private", "ray/core", "ray/dashboard", "ray/thirdparty_files", "ray/util", "starlette",
    "vllm/distributed", "vllm/engine", "vllm/entrypoints", "vllm/lora", "vllm/model_executor", "vllm/models", "vllm/renderers", "vllm/v1",
)  # fmt: skip

if __name__ == "__main__":
    for directory in DIRECTORIES:
        compileall.compile_dir(Path(sysconfig.get_path("purelib"), directory), quiet=2, workers=0)
    for module in MODULES:
        importlib.import_module(module)
