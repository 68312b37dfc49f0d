"""docs/guarantees.md promises a test for each fault: every one that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| fault", "|---"))]


def named_tests(row: str) -> list[tuple[str, str | None]]:
    """(file, test or None) of a row; "`::name`" means the file named before it."""
    found, file = [], None
    for name in re.findall(r"`((?:tests/)?[\w/.]*(?:::\w+)?)`", row.rsplit("|", 2)[1]):
        path, _, test = name.partition("::")
        file = path or file
        found.append((file, test or None))
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:60] for row in ROWS])
def test_the_tests_of_a_guarantee_exist(row):
    named = named_tests(row)
    assert named, "no test is named"
    for path, test in named:
        functions = [n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)]
        assert test in functions if test else any(name.startswith("test_") for name in functions), f"{path}::{test}"
