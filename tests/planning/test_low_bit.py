"""--ref.load_in_4bit and --actor.adam.state_bits 8: what is refused, with which reason, and what a dry run counts."""

from pathlib import Path

import pytest

from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.planning import low_bit
from qarl_openrlhf.planning.memory import estimate
from qarl_openrlhf.planning.model_shape import ModelShape
from qarl_openrlhf.planning.parts import GIB
from tests.e2e.conftest import argv

CONFIGS = Path(__file__).parent / "configs"
FLAGS = {
    "actor.model_name_or_path": str(CONFIGS / "qwen3-8b"), "data.prompt_dataset": "none.jsonl", "reward.remote_url": "none.py",
    "vllm.num_engines": 8, "actor.num_gpus_per_node": 8, "ref.num_gpus_per_node": 8, "train.colocate_all": True,
    "algo.kl.init_coef": 0.001, "ds.zero_stage": 2, "dry_run": True, "dry_run_gpu_gb": 80,
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Whether or not bitsandbytes is: these tests start nothing that would use it."""
    monkeypatch.setattr(low_bit, "find_spec", lambda name: name)


def resolve(**flags):
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return train_qarl.resolve(argv({k: v for k, v in (FLAGS | named).items() if v is not None}))[0]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"ref__load_in_4bit": True, "algo__kl__init_coef": 0}, "without a KL term has no effect"),
        ({"ref__load_in_4bit": True, "ref__offload": True}, "--ref.load_in_4bit with --ref.offload"),
        (
            {"actor__adam__state_bits": 8, "actor__optim": "muon", "actor__muon__lr": 1e-6},
            "is for AdamW, and --actor.optim is muon",
        ),
        ({"actor__adam__state_bits": 8, "ds__adam_offload": True}, "--actor.adam.state_bits 8 with --ds.adam_offload"),
        ({"actor__adam__state_bits": 8, "ds__zero_stage": 0}, "does not run with --ds.zero_stage 0: use --ds.zero_stage 2"),
        ({"actor__adam__state_bits": 8, "ds__use_universal_ckpt": True}, "with --ds.use_universal_ckpt"),
        ({"actor__adam__state_bits": 4}, "invalid choice: 4"),
        ({"ds__load_in_4bit": True, "quant__scheme": "w4a16"}, "--ref.load_in_4bit is for the reference model alone"),
    ],
)
def test_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        resolve(**flags)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{"ref__load_in_4bit": True}, {"actor__adam__state_bits": 8}])
def test_the_package_is_asked_for(flags, monkeypatch, capsys):
    monkeypatch.setattr(low_bit, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        resolve(**flags)
    assert "pip install --no-deps -r requirements/bitsandbytes.txt" in capsys.readouterr().err


def test_fused_experts_stay_bf16_and_are_refused(capsys):
    with pytest.raises(SystemExit):
        train_qarl.main(argv(FLAGS | {"actor.model_name_or_path": str(CONFIGS / "qwen3-30b-a3b"), "ref.load_in_4bit": True}))
    assert "the 128 experts" in capsys.readouterr().err


def test_the_dry_run_counts_them():
    """Qwen3-8B: 8.2e9 weights, 6.9e9 of them in linear layers of the decoder."""
    shape = ModelShape(
        parameters=8_190_735_360, quantized=6_945_767_424, matrices=6_945_767_424, largest=50_331_648, largest_other=622_329_856,
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, vocabulary=151_936,
    )  # fmt: skip

    def part(name: str, **flags) -> float:
        (found,) = [part for one in estimate(resolve(**flags), shape) for part in one.parts if part.name == name]
        return found.bytes

    plain, small = part("reference model"), part("reference model (NF4)", ref__load_in_4bit=True)
    assert plain == 2 * shape.parameters
    assert (
        small == pytest.approx(2 * (shape.parameters - shape.matrices) + 0.516 * shape.matrices, rel=1e-3) and small < 6 * GIB
    )
    assert part("reference model (NF4)", ref__load_in_4bit=True, ds__zero_stage=3) == small  # whole on every GPU
    assert part("optimizer state") == 8 * shape.parameters / 8
    assert part("optimizer state (8 bits)", actor__adam__state_bits=8) == pytest.approx(2.03 * shape.parameters / 8, rel=1e-2)
