"""Every scripts/train_*.sh: the command it makes is one that train_qarl takes, and its dry run fits the card it is for.

The scripts run; train_qarl then runs in this process on hand-written config.json files of the models' shapes.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from qarl_openrlhf.cli import train_qarl

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = Path(__file__).parent / "configs"
RECIPES = {
    "qwen2.5_math_1.5b": ("qwen2.5-math-1.5b", 1.54e9),
    "qwen2.5_math_7b": ("qwen2.5-math-7b", 7.6e9),
    "qwen3_8b": ("qwen3-8b", 8.2e9),
    "qwen3_30b_a3b": ("qwen3-30b-a3b", 30.5e9),
    "qwen2.5_math_1.5b_1gpu": ("qwen2.5-math-1.5b", 1.54e9),
    "qwen3_8b_1gpu": ("qwen3-8b", 8.2e9),
}
ARMS = ("bf16", "rollout", "qarl")


def run_script(recipe: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    model = str(CONFIGS / RECIPES[recipe][0])
    card = "24" if recipe == "qwen2.5_math_1.5b_1gpu" else "80"  # what the scripts say themselves where no GPU is visible
    planned = ["--actor.model_name_or_path", model, "--dry_run", "--dry_run_gpu_gb", card]
    command = ["bash", str(ROOT / f"scripts/train_{recipe}.sh"), *planned, *flags]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("QARL_")}
    return subprocess.run(command, env={**inherited, "QARL_PRINT_COMMAND": "1", **env}, capture_output=True, text=True)


def command_of(recipe: str, arm: str, *flags: str, **env: str) -> list[str]:
    done = run_script(recipe, *flags, ARM=arm, **env)
    assert done.returncode == 0, done.stderr
    python, *module = (words := shlex.split(done.stdout))[:3]
    assert python.endswith("bin/python") and module == ["-m", "qarl_openrlhf.cli.train_qarl"]
    return words[3:]


def test_every_script_is_tested():
    assert {path.stem.removeprefix("train_") for path in (ROOT / "scripts").glob("train_*.sh")} == set(RECIPES)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run(recipe, arm, capsys):
    train_qarl.main(command_of(recipe, arm))  # SystemExit if anything does not fit
    text = capsys.readouterr().out
    one_gpu = recipe.endswith("_1gpu")
    assert "8 optimizer steps of" in text and ("= 4096 samples" in text) is not one_gpu
    assert f"{1 if one_gpu else 8} GPUs (actor {1 if one_gpu else 8}, engines shared)" in text
    assert "fits a card of 24.0 GiB" in text if recipe == "qwen2.5_math_1.5b_1gpu" else "fits a card of 80.0 GiB" in text
    assert "KV cache" in text and "logits" in text and ("optimizer state" in text) is not ("--ds.adam_offload True" in text)
    assert "--sync.transport ipc" in text


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.endswith("_1gpu")])
@pytest.mark.parametrize("arm", ARMS)
def test_learner_and_engines_apart(recipe, arm, capsys):
    """Half of the GPUs each, nothing sleeps, pushes over NCCL; what the recipe offloads stays offloaded."""
    train_qarl.main(command_of(recipe, arm, QARL_PLACE="apart"))
    text = capsys.readouterr().out
    assert "8 GPUs (actor 4, engines 4)" in text and "--sync.transport nccl" in text and "enable_sleep" not in text
    assert "each learner GPU fits" in text and "each engine GPU fits" in text


@pytest.mark.parametrize("arm", ARMS)
def test_an_8b_without_main_memory(arm, capsys):
    """QARL_OFFLOAD=0: all of it on one card of 141 GB."""
    train_qarl.main(command_of("qwen3_8b_1gpu", arm, "--dry_run_gpu_gb", "139", QARL_OFFLOAD="0"))
    text = capsys.readouterr().out
    assert "fits a card of 139.0 GiB" in text and "optimizer state" in text
    assert "--vllm.enable_sleep" in text and "--ds.enable_sleep" not in text and "--ds.adam_offload" not in text


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("recipe, offload", [("qwen3_8b_1gpu", "asleep"), ("qwen3_30b_a3b", "0")])
def test_states_that_leave_a_card_of_141_gb_while_it_samples(recipe, offload, arm, capsys):
    train_qarl.main(command_of(recipe, arm, "--dry_run_gpu_gb", "139", QARL_OFFLOAD=offload))
    text = capsys.readouterr().out
    assert "fits a card of 139.0 GiB" in text and "--ds.enable_sleep" in text and "--ds.adam_offload" not in text
    assert "max_num_seqs" in text  # what it is for: room for more responses at a time


def test_liger_is_used_where_it_is_installed(tmp_path):
    assert "--ds.use_liger_kernel" not in command_of("qwen3_8b", "qarl", QARL_VENV=str(tmp_path))
    (tmp_path / "lib" / "python3.12" / "site-packages" / "liger_kernel").mkdir(parents=True)
    assert "--ds.use_liger_kernel" in command_of("qwen3_8b", "qarl", QARL_VENV=str(tmp_path))


def test_nodes_apart():
    args, _, resources = train_qarl.resolve(command_of("qwen3_30b_a3b", "qarl", QARL_PLACE="apart", QARL_NODES="4"))
    assert (args.actor.num_nodes, args.actor.num_gpus_per_node, args.vllm.num_engines, resources.gpus) == (2, 8, 8, 32)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.endswith("_1gpu")])
def test_the_papers_setting(recipe):
    args, _, _ = train_qarl.resolve(command_of(recipe, "qarl"))
    assert args.quant.scheme == "w4a16" and args.objective.name == "tbpo" and args.objective.hyperparameters == {}
    rollout, train, actor = args.rollout, args.train, args.actor
    assert (rollout.batch_size, rollout.n_samples_per_prompt, train.batch_size) == (512, 8, 512)
    assert (args.data.max_len, rollout.max_new_tokens, rollout.temperature, rollout.top_p) == (2048 + 16384, 16384, 1.0, 1.0)
    assert (actor.optim, actor.muon.lr, actor.adam.weight_decay) == ("muon", 1e-6, 0.01)
    assert args.algo.advantage.estimator == "group_norm" and args.algo.kl.init_coef == 0 and not args.algo.kl.use_loss
    assert train.max_tokens_per_gpu == 22528


@pytest.mark.parametrize("recipe, baseline", [("qwen3_8b", "grpo_tis"), ("qwen3_30b_a3b", "gspo")])
def test_baseline_arms(recipe, baseline):
    for arm, scheme in (("bf16", "bf16"), ("rollout", "w4a16:rollout")):
        args, _, _ = train_qarl.resolve(command_of(recipe, arm))
        assert (args.quant.scheme, args.objective.name) == (scheme, baseline)


def test_flags_of_the_user_win_and_nodes_scale_the_engines():
    args, _, resources = train_qarl.resolve(
        command_of("qwen3_30b_a3b", "qarl", "--quant.scheme", "fp8", "--vllm.tensor_parallel_size", "1", "--vllm.num_engines", "8", QARL_NODES="2")
    )
    assert args.quant.scheme == "fp8" and (args.vllm.num_engines, resources.gpus) == (8, 16)
    args, _, _ = train_qarl.resolve(command_of("qwen3_30b_a3b", "qarl", QARL_NODES="4"))
    assert (args.actor.num_nodes, args.vllm.num_engines, args.train.colocate_all) == (2, 8, False)


def test_several_nodes_cannot_be_colocated(capsys):
    """An engine of another node cannot read the learner's GPU memory."""
    with pytest.raises(SystemExit):
        train_qarl.resolve(command_of("qwen3_8b", "qarl", QARL_NODES="2", QARL_PLACE="colocated"))
    assert "--train.colocate_all with --actor.num_nodes 2" in capsys.readouterr().err


def test_short_responses_get_wider_bands():
    args, _, _ = train_qarl.resolve(command_of("qwen3_8b_1gpu", "qarl"))
    assert args.objective.name == "tbpo" and args.objective.hyperparameters["band_scale"] == pytest.approx((16384 / 4000) ** 0.5)


@pytest.mark.parametrize(
    "env, message",
    [
        ({"ARM": "int4"}, "use bf16, rollout or qarl"),
        ({"ARM": "qarl", "QARL_GPUS_PER_NODE": "3"}, "engines of TP 2"),
        ({"QARL_PLACE": "beside"}, "use colocated or apart"),
        ({"QARL_PLACE": "apart", "QARL_NODES": "3"}, "halves the GPUs"),
    ],
)
def test_wrong_environment_is_refused(env, message):
    done = run_script("qwen3_30b_a3b", **env)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "recipe, flags, message",
    [
        ("qwen3_8b", ["--dry_run_gpu_gb", "48", "--actor.logprob_chunk", "0"], "lower logits"),
        ("qwen3_8b", ["--ds.zero_stage", "2"], "needs about"),
        ("qwen3_30b_a3b", ["--actor.logprob_chunk", "0", "--dry_run_gpu_gb", "64"], "--quant.cache none"),
        ("qwen3_8b", ["--vllm.gpu_memory_utilization", "0.1"], "no KV cache"),
        ("qwen3_8b", ["--vllm.gpu_memory_utilization", "0.97"], "lower KV cache"),
        ("qwen3_8b_1gpu", ["--dry_run_gpu_gb", "24"], "23.3 GiB of the card are usable"),
        ("qwen2.5_math_1.5b_1gpu", ["--data.max_len", "5120"], "does not fit the 4096 positions"),
        ("qwen2.5_math_7b", ["--model.max_positions", "16384"], "does not fit the 16384 positions"),
        ("qwen3_8b", ["--rollout.max_new_tokens", "18432"], "leaves no room for a prompt"),
        ("qwen3_8b", ["--vllm.num_engines", "4"], "8 learner GPUs, but 4 engines"),
        ("qwen3_8b", ["--train.batch_size", "8192"], "less than one optimizer step"),
        ("qwen3_30b_a3b", ["--vllm.tensor_parallel_size", "4", "--vllm.num_engines", "2"], "use TP 1 or 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_fails_and_names_what_to_lower(recipe, flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_qarl.main(command_of(recipe, "qarl", *flags))
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("recipe", list(RECIPES)[:4])
def test_parameters_are_counted(recipe):
    import torch

    from qarl_openrlhf.cli import dry_run
    from qarl_openrlhf.planning.model_shape import ModelShape
    from qarl_openrlhf.planning.positions import load_config

    args, _, _ = train_qarl.resolve(command_of(recipe, "qarl"))
    config = load_config(args)
    model, plan = dry_run._planned(args, config)
    shape = ModelShape.of(model, plan, config)
    assert next(model.parameters()).device == torch.device("meta")
    assert shape.parameters == pytest.approx(RECIPES[recipe][1], rel=0.02)
    assert shape.matrices == shape.quantized < shape.parameters


def test_ray_job_carries_the_environment_but_no_secret():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("QARL_", "HF_", "NCCL_"))}
    environment |= {"ARM": "rollout", "QARL_NODES": "2", "QARL_PRINT_COMMAND": "1", "HF_TOKEN": "secret", "HF_HOME": "/shared/hf cache"}
    script = ["bash", str(ROOT / "scripts/ray_submit.sh")]
    done = subprocess.run([*script, "http://head:8265", "train_qwen3_8b.sh", "--train.seed", "1"], env=environment, capture_output=True, text=True)
    ray, *words = shlex.split(done.stdout)
    assert ray.endswith("bin/ray") and words[:5] == ["job", "submit", "--address", "http://head:8265", "--"]
    assert words[5:9] == ["env", "ARM=rollout", "QARL_NODES=2", "HF_HOME=/shared/hf cache"]
    assert words[9:] == ["bash", str(ROOT / "scripts/train_qwen3_8b.sh"), "--train.seed", "1"]
    wrong = subprocess.run([*script, "http://head:8265", "train_nothing.sh"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "train_qwen3_8b.sh" in wrong.stderr


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "scripts").rglob("*.s*")))
def test_shell_syntax(path):
    assert subprocess.run(["bash", "-n", str(ROOT / path)], capture_output=True).returncode == 0
