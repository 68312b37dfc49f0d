"""Words for a disk that has no room: how much is free, and which flag names another."""

import errno
import os
import shutil
from pathlib import Path


def size(number: float) -> str:
    """Bytes in GiB, below one in MiB: 23 MiB free of 24 are not 0.02 of 0.02 GiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def why_not_written(error: Exception, directory: str | os.PathLike, flag: str) -> str:
    """The reason in one line. flag: of ``directory``, without its dashes."""
    free = f"{size(shutil.disk_usage(directory).free)} are free on its disk" if Path(directory).is_dir() else "no such directory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({free}); free some or name another disk with --{flag}"
    return f"{type(error).__name__}: {error} ({free})"
