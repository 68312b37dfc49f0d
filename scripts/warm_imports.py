"""Imports what a run and its tests import, so that it is compiled once: setup_env.sh runs this without
PYTHONDONTWRITEBYTECODE, which most container images set. Without kept bytecode every process of every run compiles 7,000
modules anew, 12 to 18 s of CPU each (policy actor 24 -> 10 s, engine 30 -> 12 s); a run has five.

It is also the first sign that the environment works: what cannot be imported here ends set-up with its error.
"""

import importlib
import warnings

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

for module in MODULES:
    importlib.import_module(module)
