"""Numbers that divide by zero, wait forever or train nothing are refused before OpenRLHF sees them."""

import pytest

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning.numbers import RANGES, check_numbers

BASE = [
    "--device", "cpu", "--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--reward.remote_url", "r.py",
    "--vllm.num_engines", "1", "--rollout.n_samples_per_prompt", "8",
]  # fmt: skip


def flat(**values):
    return type("Flat", (), values)()


def refusal(argv, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        train_qarl.resolve([*BASE, *argv])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("flag", RANGES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_no_flag_takes_a_number_that_is_none(flag, value):
    if RANGES[flag].or_infinite and value > 0:
        return check_numbers(flat(**{flag: [value]}))
    with pytest.raises(ConfigError, match=f"--{flag} .* is out of range: it takes a finite number"):
        check_numbers(flat(**{flag: value}))


MAY_BE_NEGATIVE = {"ckpt.save_steps", "eval.steps", "actor.entropy_coef", "reward.overlong_penalty_factor", "reward.stop_properly_penalty_coef"}


@pytest.mark.parametrize("flag", sorted(RANGES.keys() - MAY_BE_NEGATIVE - {"reward.clip_range"}))
def test_few_flags_take_a_negative_number(flag):
    with pytest.raises(ConfigError, match=f"--{flag} -1 is out of range"):
        check_numbers(flat(**{flag: -1}))


def test_the_ones_that_do():
    check_numbers(flat(**dict.fromkeys(MAY_BE_NEGATIVE, -1), **{"reward.clip_range": (-10, 10)}))


@pytest.mark.parametrize(
    "flag, wrong, right",
    [
        ("train.batch_size", 0, 1), ("train.micro_batch_size", 0, 1), ("train.max_epochs", 0, 1), ("train.num_episodes", 0, 1),
        ("rollout.batch_size", 0, 1), ("rollout.micro_batch_size", 0, 1), ("rollout.n_samples_per_prompt", 0, 1),
        ("vllm.tensor_parallel_size", 0, 2), ("vllm.num_engines", 0, 1), ("actor.num_nodes", 0, 1), ("actor.num_gpus_per_node", 0, 1),
        ("rollout.max_new_tokens", 0, 1), ("rollout.temperature", 0.0, 0.1), ("rollout.top_p", 0.0, 1.0), ("rollout.top_p", 1.5, 0.9),
        ("vllm.gpu_memory_utilization", 0.0, 1.0), ("vllm.gpu_memory_utilization", 7.0, 0.9), ("sync.timeout_s", 0.0, 0.5),
        ("sync.bucket_mb", 1e-9, 0.02), ("reward.timeout_s", 0.0, 1.0), ("ds.zero_stage", 7, 3), ("actor.adam.lr", -1e-6, 0.0),
        ("train.seed", 2**32, 0), ("preset_length", 0.0, 0.5), ("dry_run_gpu_gb", 0.0, 24.0), ("rollout.stop", ["a", ""], ["a"]),
        ("actor.eps_clip_low_high", [0.2, float("nan")], [0.2, 0.28]), ("actor.eps_clip_low_high", [-1.0, 0.2], [0.0, 0.2]),
        ("actor.adam.betas", (0.9, 2.0), (0.9, 0.95)), ("critic.adam.betas", (1.0, 0.9), (0.0, 0.0)), ("critic.adam.eps", 0.0, 1e-8),
        ("critic.max_norm", -1.0, 0.0), ("actor.dual_clip", 1.0, 3.0), ("ckpt.max_num", 0, 1), ("ckpt.max_mem", 0.0, 5.0),
        ("ckpt.save_steps", -2, -1), ("ckpt.save_steps", 0, 1), ("eval.steps", -3, -1), ("eval.steps", 0, 5),
        ("logger.logging_steps", 0, 1), ("reward.timeout_s", 1e-9, 0.01), ("reward.timeout_s", 1e300, 1e6), ("sync.bucket_mb", 1e12, 4096),
        ("ds.lora.rank", -3, 0), ("ref.num_gpus_per_node", 0, 1), ("reward.clip_range", [10, -10], [-10, 10]),
        ("algo.advantage.is_correction_threshold", [float("nan")], [2.0]), ("algo.advantage.is_correction_threshold", [5.0, 0.5], [0.5, float("inf")]),
    ],
)  # fmt: skip
def test_ends_of_the_ranges(flag, wrong, right):
    check_numbers(flat(**{flag: right}))
    with pytest.raises(ConfigError, match=f"--{flag} "):
        check_numbers(flat(**{flag: wrong}))


def test_every_flag_with_a_range_exists_and_its_default_is_in_it():
    parsed = train_qarl.HostCommandLine()
    train_qarl.add_flags(parsed.parser)
    defaults = parsed.parser.parse_args(BASE)
    assert set(RANGES) <= set(vars(defaults))
    check_numbers(defaults)


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--rollout.micro_batch_size", "0"], "--rollout.micro_batch_size 0 is out of range"),
        (["--preset", "tbpo_short", "--preset_length", "nan"], "a finite number above 0 tokens"),
        (["--preset", "tbpo_short", "--preset_length", "inf"], "a finite number above 0 tokens"),
        (["--dry_run", "--dry_run_gpu_gb", "nan", "--device", "auto"], "--dry_run_gpu_gb nan"),
        (["--preset", "tbpo_short", "--rollout.max_new_tokens", "abc"], "--rollout.max_new_tokens abc: give a number of tokens"),
        (["--preset", "tbpo_short", "--rollout.max_new_tokens", "0"], "--rollout.max_new_tokens 0: give a number of tokens, 1 or more"),
        (["--actor.model_name_or_path", " "], "--actor.model_name_or_path is missing"),
        (["--quant.kernel", "triton"], "on a CPU use auto or torch"),
        (["--eval.steps", "0"], "--eval.steps 0 is out of range: it takes a finite number at least 1, or -1 for never"),
        (["--actor.adam.betas", "2", "-1"], "--actor.adam.betas 2 -1 is out of range: it takes a finite number at least 0 and below 1"),
        (["--data.input_template", "no placeholder"], "--data.input_template 'no placeholder' needs {} just once"),
        (["--use_ms"], "needs the package modelscope"),
        (["--quant.schem", "w4a16"], "unrecognized arguments: --quant.schem"),
        (["--preset", "tbpo_shrt"], "unknown preset"),
        (["--objective.name", "mis", "--objective.is_low", "1.2", "--objective.is_high", "1.5"], "exclude 1"),
        (["--objective.name", "mis", "--objective.is_high", "0.9"], "use is_low <= 1 <= is_high"),
    ],
)
def test_the_command_line_refuses_in_a_few_lines(extra, message, capsys):
    text = refusal(extra, capsys)
    assert message in text and len(text.splitlines()) < 6


@pytest.mark.parametrize("value", ["-3e-6", "-3E+2", "-1.", "-.5", "-.5e3", "-1", "-2.5", "-inf", "-nan"])
def test_a_negative_number_is_a_value_however_it_is_written(value, capsys):
    """argparse knows -1 and -2.5 by itself and takes the others for flags, so that it misses a value."""
    said = refusal(["--actor.adam.lr", value], capsys)
    assert f"--actor.adam.lr {float(value):g} is out of range" in said, said


def test_what_only_begins_like_a_number_is_still_a_flag(capsys):
    for word in ("-3e", "-e5", "-.", "-1x"):
        assert "--actor.adam.lr: expected one argument" in refusal(["--actor.adam.lr", word], capsys)
