"""Commands in README.md and docs/: their flags exist, and each is run by a test, was run with its result kept, or is said to be
unrun.

A new command needs a line in EVIDENCE: tests (FILE::NAME), or files of a run, that run it with other paths and models.
"""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from qarl_openrlhf.cli import ablate_objectives, bench_step, doctor, evaluate, export, prepare_data, train_qarl
from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine
from qarl_openrlhf.data import small_qwen3
from qarl_openrlhf.patches import vllm_cpu

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START = re.compile(r"    (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python3?\S* -m|bash|pip|vllm|sbatch|source|hf|docker) ")


def commands(page: Path) -> list[str]:
    lines = page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+# .*", "", line).strip() for line in lines if START.match(line)]


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]
PARSERS = {module.__name__: module.make_parser for module in (evaluate, export, prepare_data, small_qwen3)}

RECIPES = "tests/planning/test_recipes.py"
EVIDENCE = [  # the first that matches
    (r"cli\.evaluate --table", ["tests/evaluation/test_evaluate.py::test_table_of_runs"]),
    (r"cli\.evaluate .*livecodebench", ["tests/evaluation/test_livecodebench.py::test_a_whole_evaluation"]),
    (r"cli\.evaluate .*arc-c", ["tests/evaluation/test_harness.py::test_the_three_tasks"]),
    (r"cli\.evaluate ", ["tests/evaluation/test_evaluate.py::test_with_vllm_on_a_made_set"]),
    (
        r"requirements/(eval|bitsandbytes|liger)\.txt",
        ["tests/evaluation/test_harness.py::test_the_three_tasks", "tests/optim/test_adam8bit.py::test_moments_of_8_bits"],
    ),
    (r"cli\.export .*--verify", ["tests/cli/test_export.py::test_verify_in_vllm"]),
    (r"cli\.export ", ["tests/cli/test_export.py::test_a_deepspeed_checkpoint_is_the_learner_s_parameters"]),
    (r"(vllm|vllm_cpu) serve ", ["tests/cli/test_serve.py::test_served_log_probs_are_the_learners"]),
    (r"cli\.prepare_data ", ["tests/data/test_prepare_data.py::test_real_columns_to_jsonl_without_overlap"]),
    (r"cli\.doctor", ["tests/doctor/test_doctor.py::test_command_line"]),
    (r"cli\.report --tokens", ["tests/report/test_tokens_html.py"]),
    (r"cli\.train_qarl ", ["tests/e2e/test_loop.py::test_two_steps"]),
    (r"cli\.ablate_objectives ", ["tests/e2e/test_ablation.py::test_two_steps"]),
    (r"cli\.bench_step ", ["benchmarks/results/step_8b_h200.json", "benchmarks/results/step_30b-a3b_h200.json"]),
    (r"cli\.bench_kernels ", ["benchmarks/results/kernels_layer_h200.json"]),
    (r"benchmarks/gpu/kernels\.sh", ["benchmarks/results/kernels_layer_h100.json"]),
    (r"data\.small_qwen3 ", ["tests/data/test_small_qwen3.py"]),
    (r"scripts/quickstart\.sh", ["docs/results/quickstart/seed0.metrics.jsonl.gz"]),
    (r"scripts/quickstart_gpu\.sh", ["docs/results/quickstart_gpu/seed0.metrics.jsonl.gz"]),
    (
        r"scripts/setup_env\.sh|source \.venv",
        ["tests/setup/test_setup_env.py", "docs/results/quickstart_gpu/seed0.metrics.jsonl.gz"],
    ),
    (r"scripts/test\.sh", ["tests/setup/test_scripts.py"]),
    (r"scripts/train_\S+ --dry_run", [f"{RECIPES}::test_dry_run"]),
    (r"scripts/ray_submit\.sh", ["tests/planning/test_cluster_scripts.py::test_ray_submit_runs_a_recipe"]),
    (
        r"scripts/slurm\.sbatch",
        ["tests/planning/test_cluster_scripts.py::test_two_nodes_join_and_the_recipe_runs_on_the_first"],
    ),
]
# Commands that nobody has run to their end, and what their page says of that.
UNRUN = [(r"ARM=qarl bash scripts/train_qwen3_8b\.sh$", "has been run to its end")]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_flags_exist(page, command):
    words = shlex.split(command)
    if "-m" not in words[:3]:
        scripts = [word for word in words if word.startswith("scripts/")]
        assert all((ROOT / script).is_file() for script in scripts)
        return
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if module == doctor.__name__:
        doctor.parse(arguments)
    elif module in PARSERS:
        PARSERS[module]().parse_args(arguments)
    elif module == "qarl_openrlhf.cli.train_qarl":
        host = HostCommandLine()
        add_flags(host.parser)
        host.parser.parse_args(arguments)
    elif module == bench_step.__name__:  # flags with a dot are the learner's
        _, others = bench_step._parser().parse_known_args(arguments)
        host = HostCommandLine()
        add_flags(host.parser)
        host.parser.parse_args(others)
    elif module == ablate_objectives.__name__:
        ablate_objectives._parser().parse_known_args(arguments)
    elif module == vllm_cpu.__name__:  # the rest are vLLM's own
        assert vllm_cpu.with_memory(arguments)[:2] == arguments[:2] and arguments[0] == "serve"
    else:
        help_of(module, [word for word in arguments if word.startswith("--")])


def help_of(module: str, flags: list[str]) -> None:
    """Every flag is one that the module's own parser knows."""
    found = []
    original = argparse.ArgumentParser.parse_args

    def keep(parser, *args, **kwargs):
        found.append(parser)
        raise SystemExit

    argparse.ArgumentParser.parse_args = keep
    try:
        with pytest.raises(SystemExit):
            importlib.import_module(module).main([])
    finally:
        argparse.ArgumentParser.parse_args = original
    known = {option for action in found[0]._actions for option in action.option_strings}
    assert set(flags) <= known


@pytest.mark.parametrize("page, command", COMMANDS)
def test_it_is_run_or_said_to_be_unrun(page, command):
    for pattern, sentence in UNRUN:
        if re.search(pattern, command):
            assert sentence in (ROOT / "docs" / page).read_text(encoding="utf-8"), command
            return
    evidence = next((evidence for pattern, evidence in EVIDENCE if re.search(pattern, command)), [])
    assert evidence, f"{command} (in {page}): which test runs it?"
    for each in evidence:
        path, _, name = each.partition("::")
        assert (ROOT / path).is_file(), each
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), each


def test_the_pages_have_commands_and_real_paths():
    assert len(COMMANDS) >= 25 and {"README.md", "first_run.md", "recipes.md", "evaluate.md", "data.md"} <= {
        page for page, _ in COMMANDS
    }
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:qarl_openrlhf|tests|scripts|benchmarks)/[\w./-]+\.(?:py|sh|json|sbatch))", text):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
        for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_command_of_the_readme_fits_what_it_says(tmp_path, capsys):
    """Eight GPUs of 80 GB, by its own dry run; only paths are others."""
    command = next(words for page, words in COMMANDS if page == "README.md" and "cli.train_qarl " in words)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n' * 1000)
    other = {
        "Qwen/Qwen3-8B": str(ROOT / "tests/planning/configs/qwen3-8b"),
        "prompts.jsonl": str(tmp_path / "prompts.jsonl"),
        "my_reward.py": str(ROOT / "tests/tiny_reward.py"),
    }
    words = [other.get(word, word) for word in shlex.split(command)[3:]]
    train_qarl.main([*words, "--metrics.dir", str(tmp_path), "--dry_run", "--dry_run_gpu_gb", "80"])
    text = capsys.readouterr().out
    assert "each learner GPU fits a card of 80.0 GiB" in text and "8 GPUs (actor 4, engines 4)" in text
    assert text.rstrip().splitlines()[-1].startswith("dry run: nothing found")
