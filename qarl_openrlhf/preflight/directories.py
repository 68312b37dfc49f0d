"""Directories that the run writes to can be made and written."""

import os
import tempfile

from qarl_openrlhf.config import ConfigError


def check_directories(args) -> None:
    """ConfigError for a directory that is a file, or that cannot be written; nothing is left behind."""
    for flag, path in (("metrics.dir", args.metrics.dir), ("ckpt.output_dir", args.ckpt.output_dir), ("ckpt.path", args.ckpt.path)):
        if not path:
            raise ConfigError(f"--{flag} is empty: name a directory")
        existing = os.path.abspath(path)
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            raise ConfigError(f"--{flag} {path}: {existing} is not a directory: name another")
        try:
            # Permissions do not tell: a file system may be read-only or full.
            with tempfile.TemporaryDirectory(prefix=".qarl-", dir=existing):
                pass
        except OSError as error:
            raise ConfigError(f"--{flag} {path}: cannot write to {existing} ({error.strerror}): name another directory") from None
