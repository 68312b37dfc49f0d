"""Which error of a run has a message of ours, written for whoever started it: how Ray came there is of no use to them."""

import re

PACKAGE = __package__.partition(".")[0]
# The last line of the traceback that Ray makes of an actor whose ``__init__`` failed; the error itself does not travel.
_RAISED = re.compile(rf"^{PACKAGE}(?:\.\w+)+: (.+)", re.DOTALL)


def own_message(error: BaseException) -> str | None:
    """The message of the error of this package that ``error`` is, or that Ray wraps in it, however often; None of any other."""
    while isinstance(getattr(error, "cause", None), BaseException):
        error = error.cause
    if type(error).__module__.partition(".")[0] == PACKAGE:
        return str(error)
    if getattr(error, "actor_init_failed", False):
        lines = str(error).rstrip().split("\n")
        code = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
        if found := _RAISED.match("\n".join(lines[code + 1 :])):
            return found[1]
    return None
