"""docs/metrics.md and docs/objectives.md have every number of the runs that are kept, and every name that the code spells out."""

import ast
import gzip
import json
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("metrics.md", "objectives.md")]
GROUP = r"(?:async|error_token|is|kernels|memory|mismatch|objective|policy|rollout|sync|timing)/"
IN_CODE = re.compile(GROUP + r"\w*[^\W_]")  # one that ends in _ is part of an f-string
# Taken out again by the trainer: two become notes, one a part of timing/step_total.
NOT_WRITTEN = {"kernels/choices", "objective/warning", "timing/update_total"}
ANY = r"(<\w+>|NAME)"  # what stands for a number or a name


def names_of(cell: str) -> Iterator[str]:
    """The names of a table's first cell: `is/b_x`, `c`, `_y` are is/b_x, is/c and is/c_y; `_y` after `b_x` may be is/b_y, too; `..._z` is
    each of those before it with _z."""
    full: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.startswith("..._"):
            yield from [first + name[3:] for first in full]
        elif name.startswith("_") and full:
            yield from (full[-1] + name, full[-1].rpartition("_")[0] + name)
        else:
            group = re.match(GROUP, full[0] if full and not re.match(GROUP, name) else "")
            full.append(f"{group[0] if group else ''}{name}")
            yield full[-1]


def pattern_of(name: str) -> str:
    """A regular expression; `{pos,neg}` is one of the two."""
    found = "".join("[^/]+" if re.fullmatch(ANY, part) else re.escape(part) for part in re.split(ANY, name))
    return re.sub(r"\\\{([\w,]+)\\\}", lambda choice: f"(?:{choice[1].replace(',', '|')})", found)


@cache
def documented() -> re.Pattern:
    cells = [row for page in PAGES for row in re.findall(r"^\| (`.*?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)]
    return re.compile("|".join(pattern_of(name) for cell in cells for name in names_of(cell)))


def undocumented(names) -> list[str]:
    return sorted(name for name in names if not documented().fullmatch(name))


def kept_files() -> Iterator[tuple[str, str]]:
    """(name, text) of every metrics.jsonl that is kept."""
    for path in sorted((ROOT / "docs" / "results").rglob("*.metrics.jsonl.gz")):
        yield str(path), gzip.decompress(path.read_bytes()).decode()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.metrics.jsonl")):
        yield str(path), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "results").rglob("runs.tar.*")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith("/metrics.jsonl"):
                    yield f"{path}: {member.name}", archive.extractfile(member).read().decode()


def test_every_number_of_a_kept_run():
    missing, files = {}, 0
    for name, text in kept_files():
        files += 1
        for line in text.splitlines():
            missing |= {metric: name for metric in undocumented(json.loads(line))}
    assert files > 20 and not missing


def test_every_name_in_the_code():
    found = set()
    for path in (ROOT / "qarl_openrlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_CODE.fullmatch(node.value):
                found.add(node.value)
    assert len(found) > 40 and not undocumented(found - NOT_WRITTEN)


def test_the_check_finds_what_is_missing():
    assert list(names_of("`is/b`, `c_x`; `_y`")) == ["is/b", "is/c_x", "is/c_x_y", "is/c_y"]
    assert list(names_of("`is/b`, `c/<n>`, `..._e`")) == ["is/b", "is/c/<n>", "is/b_e", "is/c/<n>_e"]
    assert re.fullmatch(pattern_of("is/b_{pos,neg}_by/<p>"), "is/b_neg_by/0.001")
    assert undocumented(["sync/no_such", "policy/updates", "kernels/act_quant_calls", "no_such"]) == ["no_such", "sync/no_such"]
