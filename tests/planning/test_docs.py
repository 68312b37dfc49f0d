"""docs/recipes.md and docs/troubleshooting.md name metrics that exist, and lengths that the dry run's estimate gives."""

import re
from importlib.util import module_from_spec, spec_from_file_location
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


def rows(text: str, model: str) -> list[list[str]]:
    """Cells of the model's row in each table."""
    lines = re.findall(rf"^\| {model} \|(.*)\|$", text, re.MULTILINE | re.IGNORECASE)
    return [["0" if cell.strip() == "0.0" else cell.strip() for cell in line.split("|")] for line in lines]


def test_the_tables_of_card_limits_are_what_the_script_prints(capsys):
    spec = spec_from_file_location("card_limits", ROOT / "benchmarks/card_limits.py")
    card_limits = module_from_spec(spec)
    spec.loader.exec_module(card_limits)
    card_limits.main([str(ROOT / "tests/planning/configs/qwen3-8b")])  # one of four: the others are by the same lines
    section = (ROOT / "docs/recipes.md").read_text().partition("## How far a card goes")[2].partition("\n## ")[0]
    printed = rows(capsys.readouterr().out, "qwen3-8b")
    assert len(printed) == 2 and printed == rows(section, "qwen3-8b")
