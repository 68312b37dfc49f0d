"""--ds.use_liger_kernel: where it is refused, and that the layers it leaves are quantized (its kernels run on GPUs only: tests/gpu)."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.planning import liger
from tests.overlay import with_packages

CONFIGS = Path(__file__).parent / "configs"


def arguments(model: str = "qwen3-8b", on: bool = True):
    return N(ds=N(use_liger_kernel=on), actor=N(model_name_or_path=str(CONFIGS / model)))


def test_refused_with_what_would_work(monkeypatch, tmp_path):
    liger.check_liger(arguments(on=False), "cpu")
    with pytest.raises(ConfigError, match="drop it on a CPU"):
        liger.check_liger(arguments(), "cpu")
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps -r requirements/liger.txt"):
        liger.check_liger(arguments(), "cuda")
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    for model in ("qwen3-8b", "qwen3-30b-a3b"):
        liger.check_liger(arguments(model), "cuda")
    other = json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text()) | {"model_type": "qwen2_moe"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="replaces the experts of a qwen2_moe.* knows qwen3_moe"):
        liger.check_liger(arguments(str(tmp_path)), "cuda")


LAYERS = """
import torch
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from qarl_openrlhf.quant.convert import convert_model
from qarl_openrlhf.quant.scheme import QuantScheme
from tests.tiny_models import make_model

for family in ("llama", "qwen2", "qwen3"):
    models = [make_model(family, hidden=128) for _ in range(2)]
    _apply_liger_kernel_to_instance(models[1])
    replaced = [m for m in models[1].modules() if "Liger" in m.forward.__qualname__]
    assert len(replaced) >= 7, replaced
    found = []
    for model in models:
        report = convert_model(model, QuantScheme.parse("w4a16:g64"))
        kinds = {n: type(m).__name__ for n, m in model.named_modules() if "Linear" in type(m).__name__}
        found.append((kinds, [plan.name for plan in report.quantized]))
    assert found[0] == found[1] and len(found[0][1]) == 14, found

from types import SimpleNamespace as N
from liger_kernel.transformers import AutoLigerKernelForCausalLM
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe
from qarl_openrlhf.patches import liger

plain = make_model("qwen3_moe", hidden=128)
forward = modeling_qwen3_moe.Qwen3MoeForCausalLM.forward
for _ in range(2):
    liger.keep_experts(N(ds=N(use_liger_kernel=True)))
model = AutoLigerKernelForCausalLM.from_config(plain.config)
kinds = {type(m).__name__ for m in model.modules()}
assert "LigerRMSNorm" in kinds and "Qwen3MoeRMSNorm" not in kinds, kinds
assert "Qwen3MoeExperts" in kinds and not any("Experts" in k and "Liger" in k for k in kinds), kinds
assert modeling_qwen3_moe.Qwen3MoeForCausalLM.forward is forward
names = [[plan.name for plan in convert_model(m, QuantScheme.parse("w4a16:g32")).quantized] for m in (plain, model)]
assert names[0] == names[1] and any("experts" in name for name in names[0]), names
"""


@pytest.mark.slow
def test_its_models_are_quantized_as_the_plain_ones(tmp_path):
    """In a process of its own: Liger's changes reach every model of a process."""
    environment = with_packages("liger", "liger_kernel", tmp_path)
    done = subprocess.run([sys.executable, "-c", LAYERS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
