"""--dry_run: only what differs from the defaults, effective hyperparameters, main memory on a CPU, and the answer at the end."""

import re

import pytest

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.planning import host_memory
from tests.cli.test_train_qarl import base, model, prompts  # noqa: F401  fixtures


def printed(argv, capsys) -> str:
    train_qarl.main(argv)
    return capsys.readouterr().out


def section(text: str, title: str) -> list[str]:
    """The lines below ``title:``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    return [line.strip() for line in lines[start : start + [*lines[start:], ""].index("")]]


def test_flags_are_those_that_differ_and_all_of_them_on_demand(base, capsys):  # noqa: F811
    run = [*base, "--quant.scheme", "w4a16:g64", "--data.max_len", "512", "--train.seed", "42", "--actor.adam.lr", "3e-6"]
    flags = section(printed([*run, "--dry_run"], capsys), "flags that differ")
    names = [line.split()[0] for line in flags]
    assert "--quant.scheme w4a16:g64" in flags and "--actor.adam.lr 3e-06" in flags and "--data.max_len 512" in flags
    assert "--sync.transport gloo" in flags and "--quant.cache dequant" in flags  # what auto became
    assert not {"--train.seed", "--dry_run", "--ds.zero_stage", "--logger.wandb.run_name"} & set(names)
    every = section(printed([*run, "--dry_run_all"], capsys), "flags:")
    assert len(every) > 150 and "--train.seed 42" in every and set(flags) <= set(every)


def test_hyperparameters_are_effective_values(base, capsys):  # noqa: F811
    text = printed([*base, "--objective.name", "gspo", "--objective.is_cap", "3", "--data.max_len", "512", "--dry_run"], capsys)
    objective = section(text, "objective")
    assert objective[0] == "gspo" and not any("None" in line for line in objective)
    assert "--objective.is_cap 3.0" in objective and "--objective.seq_clip_ratio_high 0.0004  (default)" in objective
    text = printed([*base, "--data.max_len", "512", "--dry_run"], capsys)
    assert section(text, "objective") == ["OpenRLHF's own loss, --actor.policy_loss_type ppo"]


def test_the_answer_comes_last(base, capsys):  # noqa: F811
    run = [*base, "--data.max_len", "512", "--dry_run", "--rollout.batch_size", "32", "--train.batch_size", "64"]
    text = printed(run, capsys)
    assert text.rstrip().splitlines()[-1] == "dry run: nothing found that would keep this run from starting on this machine"
    assert section(text, "one rollout") == ["32 prompts x 8 responses = 256 samples, 4 optimizer steps of 64"]
    assert re.match(r"total +\d+\.\d\d GiB of the machine's", section(text, "memory")[-2])
    assert "learner and engine: torch" in section(text, "kernels")[0]


def test_a_run_that_does_not_fit_main_memory_is_refused_before_ray(base, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 2 * host_memory.GIB)
    for extra in (["--dry_run"], []):
        with pytest.raises(SystemExit) as stopped:
            train_qarl.main([*base, "--data.max_len", "512", *extra])
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and "nothing found" not in captured.out
        assert re.search(r"needs about \d\.\d GiB of main memory, and this machine has 2.0 GiB: lower KV cache \(1.0 GiB\) with", captured.err)


def test_notes_that_only_say_what_the_machine_is(base, capsys):  # noqa: F811
    quiet = train_qarl.resolve([*base, "--objective.name", "tbpo"])[1]
    assert [note.split()[0] for note in quiet] == ["--algo.kl.init_coef"]
    for flag in ("--verbose", "--dry_run"):
        notes = train_qarl.resolve([*base, "--objective.name", "tbpo", flag])[1]
        assert {"--vllm.enforce_eager", "--ds.attn_implementation"} <= {note.split()[0] for note in notes}
