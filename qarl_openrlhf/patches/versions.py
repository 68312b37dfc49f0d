"""Version guard shared by all patches."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


class PatchError(RuntimeError):
    """A package that we patch is missing or has a version our patch was not written for."""


def require_version(package: str, supported: str) -> str:
    """Return the installed version of ``package`` or raise ``PatchError`` if it is not in ``supported`` (PEP 440)."""
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
