"""What is a local path and what a name on the hub, and where a run's paths lead."""

import os

from qarl_openrlhf.config import ConfigError


def looks_local(name: str) -> bool:
    """Whether ``name`` can only have been meant as a path of this machine: the hub's are NAME or OWNER/NAME."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or (name.count("/") > 1 and "://" not in name)


def require_file(flag: str, path: str, meaning: str) -> None:
    """ConfigError unless ``path`` is a readable file."""
    if not os.path.isfile(path):
        found = "is a directory" if os.path.isdir(path) else f"does not exist (looked in {os.getcwd()})"
        raise ConfigError(f"--{flag} {path} {found}: give {meaning}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"--{flag} {path} cannot be read: check its permissions")


def quantized_directory(args) -> str:
    """Where the quantized export of a finished run goes."""
    scheme = args.quant.scheme.removesuffix(":rollout").replace(":", "-")
    return os.path.join(args.ckpt.output_dir, f"quantized-{scheme}")
