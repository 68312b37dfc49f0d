"""What is wrong with writing a run directory, in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qarl_openrlhf.planning.disk import why_not_written


class MetricsError(RuntimeError):
    """A file of the run directory that cannot be written. Names it, the reason and ``--metrics.dir``."""


@contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
    """Any OSError within becomes a MetricsError about ``path``: a full disk's own has no file, and nobody's has the flag."""
    try:
        yield
    except OSError as error:
        reason = why_not_written(error, os.path.dirname(path), "metrics.dir")
        there = "" if "--metrics.dir" in reason else "; it is in --metrics.dir"
        raise MetricsError(f"{path} could not be written: {reason}{there}") from error
