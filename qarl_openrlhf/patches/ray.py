"""Ray 2.55's handling of SIGTERM in a driver."""

from collections.abc import Iterator
from contextlib import contextmanager

from qarl_openrlhf.patches.replacing import replaced
from qarl_openrlhf.patches.versions import require_version


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """``ray.init`` replaces the driver's handler twice in Python (worker.py:1660, node.py:531: the process ends without a
    word); here it stays. Ray's C++ core then puts in one that prints its own stack: whoever wants another sets it after this.
    """
    require_version("ray")
    from ray._private import utils

    with replaced(utils, "set_sigterm_handler", lambda handler: None):
        yield
