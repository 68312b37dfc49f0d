"""Which Muon command lines are refused, and what the flags reach."""

import pytest

from qarl_openrlhf.cli import train_qarl
from tests.e2e.conftest import argv

FLAGS = {
    "device": "cpu",
    "actor.model_name_or_path": "./some/model",
    "data.prompt_dataset": "none.jsonl",
    "reward.remote_url": "none.py",
    "vllm.num_engines": 1,
    "actor.optim": "muon",
    "actor.muon.lr": 1e-6,
}


def resolve(**flags):
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return train_qarl.resolve(argv({k: v for k, v in (FLAGS | named).items() if v is not None}))[0]


def test_defaults_and_both_scales():
    assert resolve().actor.muon.scale == "match_rms"
    muon = resolve(actor__muon__scale="spectral", actor__muon__ns_steps=3, actor__muon__no_nesterov=True).actor.muon
    assert (muon.scale, muon.ns_steps, muon.nesterov, muon.lr) == ("spectral", 3, False, 1e-6)
    assert resolve(actor__muon__lr=0.02).actor.muon.lr == 0.02  # typed: the user's own choice


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"actor__muon__lr": None}, "--actor.optim muon without --actor.muon.lr: OpenRLHF's default of 0.02"),
        ({"ds__zero_stage": 0}, "does not run with --ds.zero_stage 0: use --ds.zero_stage 2"),
        ({"ds__zero_stage": 1, "ds__grad_accum_dtype": "fp32"}, "does not run with --ds.grad_accum_dtype fp32 at stage 1"),
        ({"actor__muon__ns_steps": 0}, "at least 1 step"),
        ({"actor__muon__scale": "rms"}, "invalid choice: 'rms'"),
        (
            {"critic__model_name_or_path": "some/critic", "critic__optim": "muon", "algo__advantage__estimator": "gae"},
            "--critic.optim muon without --critic.muon.lr",
        ),
    ],
)
def test_refusals(flags, message, capsys):
    with pytest.raises(SystemExit):
        resolve(**flags)
    assert message in " ".join(capsys.readouterr().err.split())
