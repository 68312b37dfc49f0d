"""The process that :mod:`loading` starts: it loads a user's file as an engine does, and writes what became of that.

The file's code may do anything to this process. The answer: {"error": None, or what the run would end with}.
"""

import asyncio
import atexit
import ctypes
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import traceback

PR_SET_PDEATHSIG = 1


def main() -> None:
    request = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a crash nothing stays in the directory
    if os.getppid() != request["parent"]:  # it ended before that
        os._exit(0)
    sys.path[:], sys.argv[:] = request["sys_path"], [request["path"]]
    asyncio.run(_answer(request))
    atexit._run_exitfuncs()
    os._exit(0)  # threads that the file left would keep the process


async def _answer(request: dict) -> None:
    """In a running loop, as in an engine's actor: clients that a file makes may need one."""
    from qarl_openrlhf.engine.user_file import told

    error = None
    try:
        spec = importlib.util.spec_from_file_location(request["module"], request["path"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, request["name"])
    except BaseException as raised:
        error = None if _of_the_engine(raised) else str(told(request["flag"], request["path"], raised))
    with open(request["answer"] + ".part", "w", encoding="utf-8") as file:
        json.dump({"error": error}, file)
    os.replace(request["answer"] + ".part", request["answer"])


def _of_the_engine(error: BaseException) -> bool:
    """Whether it may come from what an engine's process has and this one has not: Ray, and the GPU that Ray gives it."""
    modules = [type(error).__module__, *(frame.f_globals.get("__name__") or "" for frame, _ in traceback.walk_tb(error.__traceback__))]
    return any(module.partition(".")[0] == "ray" for module in modules) or bool(re.search("CUDA|RAY_|VLLM_|OMP_", f"{type(error).__name__} {error}"))


if __name__ == "__main__":
    main()
