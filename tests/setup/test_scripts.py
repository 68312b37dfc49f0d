"""The scripts from wherever they are called: paths with spaces, links, CDPATH, relative paths in variables; and what they refuse."""

import os
import shlex
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
    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", ignore=shutil.ignore_patterns("results"))
    setup = root / "scripts" / "setup_env.sh"
    setup.write_text('#!/bin/bash\necho "SETUP $QARL_VENV"\n')
    setup.chmod(0o755)
    for venv in (root / ".venv", tmp_path / "caller" / "my env"):
        python = venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/bash\necho "PYTHON $0 ${*//[[:space:]]/ }"\n')
        python.chmod(0o755)
    (tmp_path / "caller" / "scripts").mkdir()  # what CDPATH might lead to
    card = tmp_path / "card" / "nvidia-smi"  # for quickstart_gpu.sh
    card.parent.mkdir()
    card.write_text("#!/bin/bash\necho 'GPU 0: made up'\n")
    card.chmod(0o755)
    return root


def call(script, *args, cwd, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("QARL_") and k != "ARM"}
    return subprocess.run(["bash", str(script), *args], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=60)


def card_for(script: str, tmp_path: Path) -> dict[str, str]:
    """The variables under which the quickstart for a GPU finds the made-up one of ``tree``."""
    return {"PATH": f"{tmp_path / 'card'}:{os.environ['PATH']}"} if script.endswith("quickstart_gpu.sh") else {}


def runs_python(path: Path) -> bool:
    text = path.read_text()
    return "$python" in text or "/bin/python" in text or "recipe.sh" in text or "quickstart.sh" in text


CALLERS = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "benchmarks").glob("*.sh")]
    if runs_python(path) and path.name not in ("setup_env.sh", "ray_submit.sh")  # with tests of their own
)


@pytest.mark.parametrize("script", CALLERS)
def test_relative_paths_in_variables_are_the_callers(tree, tmp_path, script):
    """Of every script that runs Python; each takes what it knows of these variables."""
    caller = tmp_path / "caller"
    for name in ("rows.jsonl", "own_reward.py"):
        (caller / name).write_text("")
    places = dict.fromkeys(("QARL_RUN_DIR", "QARL_QUICKSTART_DIR", "QARL_ABLATION_DIR", "OUT"), "my runs")
    if script.startswith("benchmarks"):  # it copies what the run, which is none here, leaves
        for arm in ("bf16", "w4a16-g64-rollout", "w4a16-g64"):
            (caller / "my runs" / arm).mkdir(parents=True)
            (caller / "my runs" / arm / "metrics.jsonl").write_text("")
    done = call(
        tree / script, cwd=caller, QARL_VENV="my env", QARL_DATA="rows.jsonl", QARL_REWARD="own_reward.py", CDPATH=f"{caller}:{tree}", **places,
        **card_for(script, tmp_path),
    )
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0 and all(line.startswith(("SETUP", "PYTHON")) for line in lines), lines
    venv = caller / "my env"
    assert all(line == f"SETUP {venv}" for line in lines if line.startswith("SETUP"))
    pythons = [line for line in lines if line.startswith("PYTHON")]
    assert pythons and all(line.startswith(f"PYTHON {venv}/bin/python -m ") for line in pythons)
    words = "".join(pythons)
    if script.startswith("scripts/train_"):
        assert f"--data.prompt_dataset {caller}/rows.jsonl" in words and f"--reward.remote_url {caller}/own_reward.py" in words
    if script != "scripts/test.sh":
        assert f" {caller}/my runs" in words and " my runs" not in words.replace(f"{caller}/my runs", "")


def test_a_job_gets_absolute_paths(tree, tmp_path):
    caller = tmp_path / "caller"
    (caller / "rows.jsonl").write_text("")
    variables = {"QARL_VENV": "my env", "QARL_DATA": "rows.jsonl", "QARL_RUN_DIR": "out", "QARL_PRINT_COMMAND": "1"}
    done = call(tree / "scripts" / "ray_submit.sh", "http://first:8265", "train_qwen3_8b.sh", cwd=caller, **variables)
    words = shlex.split(done.stdout)
    assert words[0] == f"{caller}/my env/bin/ray"
    assert {f"QARL_VENV={caller}/my env", f"QARL_DATA={caller}/rows.jsonl", f"QARL_RUN_DIR={caller}/out"} <= set(words)


def test_what_is_no_file_of_the_callers_stays_as_it_is(tree, tmp_path):
    done = call(tree / "scripts" / "train_qwen3_8b.sh", cwd=tmp_path, QARL_DATA="owner/set", QARL_REWARD="http://judge:5000/get", QARL_RUN_DIR="/abs")
    assert "--data.prompt_dataset owner/set " in done.stdout and "--reward.remote_url http://judge:5000/get" in done.stdout
    assert "--metrics.dir /abs " in done.stdout


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
    done = call(link, cwd=cwd, CDPATH=str(tree), **card_for(script, tmp_path))
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


def test_the_gpu_quickstart_without_a_gpu_leaves_everything_as_it_is(tree, tmp_path):
    (tmp_path / "none").mkdir()
    for name in ("bash", "env", "dirname", "readlink", "basename", "grep", "sed", "cat"):
        (tmp_path / "none" / name).symlink_to(shutil.which(name))
    done = call(tree / "scripts" / "quickstart_gpu.sh", cwd=tree, PATH=str(tmp_path / "none"))
    assert done.returncode == 1 and not done.stdout
    assert "no NVIDIA GPU answers here (nvidia-smi -L): scripts/quickstart.sh is the same job on a CPU" in done.stderr


def test_good_variables(tree):
    for lr in ("5e-6", "1", "0.00001", ".5E-5", "1e+0"):
        assert call(tree / "scripts" / "quickstart.sh", cwd=tree, QARL_QUICKSTART_LR=lr, QARL_QUICKSTART_SEED="0").returncode == 0
