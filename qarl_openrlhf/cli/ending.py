"""A command that loads vLLM, as a process: its result, or its error, is the last thing it says."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def own_process(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and end the process with its status, as the interpreter would, but for the taking down of native libraries.

    Triton's nanobind lists every function it still holds then, some 30 lines, and has no switch for it outside C++. What Python
    registered with atexit (worker processes, temporary files) runs first, then an error is told, then the process ends.
    vLLM tells errors only, unless VLLM_LOGGING_LEVEL says otherwise.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    status, message = 0, ""
    try:
        main()
    except SystemExit as ending:
        if isinstance(ending.code, int):
            status = ending.code
        elif ending.code is not None:
            status, message = 1, f"{ending.code}\n"
    except BaseException as error:
        status, message = (130 if isinstance(error, KeyboardInterrupt) else 1), traceback.format_exc()
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stderr.write(message)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read it has gone
            pass
    os._exit(status)
