"""The scripts from wherever they are called: paths with spaces, links, CDPATH, relative QARL_VENV; and what they refuse."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh"))


@pytest.fixture
def tree(tmp_path):
    """Our scripts in a tree with a space in its name; set-up and Python only say that they were called."""
    root = tmp_path / "the tree"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    setup = root / "scripts" / "setup_env.sh"
    setup.write_text('#!/bin/bash\necho "SETUP $QARL_VENV"\n')
    setup.chmod(0o755)
    for venv in (root / ".venv", tmp_path / "caller" / "my env"):
        python = venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/bash\necho "PYTHON $0 ${*//[[:space:]]/ }"\n')
        python.chmod(0o755)
    (tmp_path / "caller" / "scripts").mkdir()  # what CDPATH might lead to
    return root


def call(script, *args, cwd, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("QARL_") and k != "ARM"}
    return subprocess.run(["bash", str(script), *args], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", ["quickstart.sh", "quickstart_gpu.sh", "test.sh", "ablate_objectives.sh", "train_qwen3_8b.sh"])
def test_a_relative_environment_is_the_callers(tree, tmp_path, script):
    caller = tmp_path / "caller"
    done = call(tree / "scripts" / script, cwd=caller, QARL_VENV="my env", CDPATH=f"{caller}:{tree}")
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0 and all(line.startswith(("SETUP", "PYTHON")) for line in lines), lines
    venv = caller / "my env"
    assert all(line == f"SETUP {venv}" for line in lines if line.startswith("SETUP"))
    pythons = [line for line in lines if line.startswith("PYTHON")]
    assert pythons and all(line.startswith(f"PYTHON {venv}/bin/python -m ") for line in pythons)


@pytest.mark.parametrize("script", ["quickstart.sh", "quickstart_gpu.sh", "test.sh", "train_qwen3_8b.sh", "train_qwen3_8b_1gpu.sh"])
@pytest.mark.parametrize("how", ["link", "link to a link", "relative"])
def test_a_linked_script_finds_its_tree(tree, tmp_path, script, how):
    link, cwd = tmp_path / "bin" / script, tree
    link.parent.mkdir()
    link.symlink_to(tree / "scripts" / script)
    if how == "link to a link":
        (tmp_path / "again.sh").symlink_to(Path("bin") / script)
        link = tmp_path / "again.sh"
    elif how == "relative":
        link, cwd = Path("..") / "the tree" / "scripts" / script, tmp_path / "caller"
    done = call(link, cwd=cwd, CDPATH=str(tree))
    assert done.returncode == 0, done.stderr
    assert f"PYTHON {tree}/.venv/bin/python -m " in done.stdout


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_comment_at_the_top(tmp_path, word):
    for name in SCRIPTS:
        done = call(ROOT / "scripts" / name, word, cwd=tmp_path)
        first = (ROOT / "scripts" / name).read_text().splitlines()[1].removeprefix("# ")
        assert done.returncode == 0 and done.stdout.startswith(first) and "set -euo" not in done.stdout and not done.stderr
        assert ("QARL_RUN_DIR" in done.stdout) == name.startswith("train_")


@pytest.mark.parametrize(
    "script, name, values",
    [
        ("quickstart.sh", "QARL_QUICKSTART_STEPS", ["0", "-1", "1.5", "ten", "08", "1 2", "a[$(touch hit)]"]),
        ("quickstart.sh", "QARL_QUICKSTART_SEED", ["-1", "x", "1.5"]),
        ("quickstart.sh", "QARL_QUICKSTART_LR", ["fast", "-1e-5", "1e", "1e-5x"]),
        ("quickstart.sh", "QARL_QUICKSTART_DEVICE", ["gpu", "CPU"]),
        ("ablate_objectives.sh", "QARL_ABLATION_STEPS", ["0", "x"]),
        ("ablate_objectives.sh", "QARL_ABLATION_SEEDS", ["a", "0,", "0 1", "0.5"]),
        ("train_qwen3_8b.sh", "QARL_NODES", ["0", "two"]),
        ("train_qwen3_8b.sh", "QARL_GPUS_PER_NODE", ["0", "8x"]),
        ("train_qwen3_8b.sh", "ARM", ["bf-16", "QARL"]),
    ],
)
def test_bad_variables_are_found_before_set_up(tree, script, name, values):
    for value in values:
        done = call(tree / "scripts" / script, cwd=tree, **{name: value})
        assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(f"{script[:-3]}: {name}={value}: use "), value
    assert not (tree / "hit").exists()


def test_good_variables(tree):
    for lr in ("5e-6", "1", "0.00001", ".5E-5", "1e+0"):
        assert call(tree / "scripts" / "quickstart.sh", cwd=tree, QARL_QUICKSTART_LR=lr, QARL_QUICKSTART_SEED="0").returncode == 0
