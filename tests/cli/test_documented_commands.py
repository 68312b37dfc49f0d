"""Commands of docs/data.md and docs/evaluate.md are commands: their parsers take them, and the reward file they name is there."""

import re
import shlex
from pathlib import Path

import pytest

from qarl_openrlhf.cli import evaluate, export, prepare_data
from qarl_openrlhf.data import small_qwen3

ROOT = Path(__file__).parents[2]
PARSERS = {module.__name__.rpartition(".")[2]: module.make_parser for module in (evaluate, export, prepare_data, small_qwen3)}
COMMANDS = [
    (page, line.strip())
    for page in ("data.md", "evaluate.md")
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    if line.startswith("    python -m")
]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_documented_commands_parse(page, command):
    words = shlex.split(command)
    PARSERS[words[2].rpartition(".")[2]]().parse_args(words[3:])


def test_the_pages_have_commands_and_real_paths():
    assert len(COMMANDS) >= 9
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for path in re.findall(r"qarl_openrlhf/\S+\.py|tests/\S+\.py", text):
        assert (ROOT / path).is_file(), path
