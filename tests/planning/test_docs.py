"""docs/recipes.md and docs/troubleshooting.md name flags, metrics, files and scripts that exist."""

import re
from pathlib import Path

import pytest

from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("recipes.md", "troubleshooting.md")
# of docker, ray, pip, sbatch, prepare_data, report and doctor
OTHERS = {"--ipc", "--shm-size", "--nodes", "--out", "--tokens", "--model", "--scheme", "--tp", "--cuda", "--cpu"}


@pytest.fixture(scope="module")
def flags():
    host = HostCommandLine()
    add_flags(host.parser)
    return {option for action in host.parser._actions for option in action.option_strings}


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page, flags):
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.]*(?:-size)?", text)) - OTHERS
    unknown = {name for name in named if name.rstrip(".") not in flags and name != "--model."}
    assert not unknown, unknown


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page):
    text = (ROOT / "docs" / page).read_text()
    # OpenRLHF's own timings are documented with ours and named in the code that reads them
    known = "".join(p.read_text() for p in [ROOT / "docs/metrics.md", *(ROOT / "qarl_openrlhf").rglob("*.py")])
    families = r"`((?:mismatch|is|objective|error_token|sync|rollout|timing)/[a-z_0-9]+)"
    unknown = [name for name in re.findall(families, text) if name not in known and not _folded(name, known)]
    assert not unknown, unknown


def _folded(name: str, known: str) -> bool:
    """A family is also written `is/{mean,ess}`; `error_token/*` means all of it."""
    family, _, rest = name.partition("/")
    return any(rest in group.split(",") for group in re.findall(rf"{family}/\{{([^}}]*)\}}", known))


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
    text = (ROOT / "docs" / page).read_text()
    for name in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / "docs" / name).exists(), name
    for name in re.findall(r"(?:scripts|benchmarks)/[\w./]+\.(?:sh|py|sbatch)", text) + re.findall(r"`(train_[\w.]+\.sh)`", text):
        path = name if "/" in name else f"scripts/{name}"
        assert (ROOT / path).exists(), name
