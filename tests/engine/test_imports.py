"""What an engine's process imports."""

import subprocess
import sys

CODE = """
import gc, sys
from qarl_openrlhf.engine import actor
assert gc.isenabled()
print(*[name for name in ("deepspeed", "openrlhf.models", "peft", "datasets", "transformers.trainer") if name in sys.modules])
"""


def test_an_engine_imports_nothing_that_trains():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == ""
