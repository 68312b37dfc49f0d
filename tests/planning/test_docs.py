"""docs/recipes.md and docs/troubleshooting.md name metrics that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("recipes.md", "troubleshooting.md")


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
