"""--ds.use_liger_kernel: where it is refused, and that the layers it leaves are quantized (its kernels run on GPUs only: tests/gpu)."""

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


def test_refused_with_what_would_work(monkeypatch):
    liger.check_liger(arguments(on=False), "cpu")
    with pytest.raises(ConfigError, match="drop it on a CPU"):
        liger.check_liger(arguments(), "cpu")
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps -r requirements/liger.txt"):
        liger.check_liger(arguments(), "cuda")
    monkeypatch.setattr(liger, "find_spec", lambda name: object())
    liger.check_liger(arguments(), "cuda")
    with pytest.raises(ConfigError, match="experts"):
        liger.check_liger(arguments("qwen3-30b-a3b"), "cuda")


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
"""


@pytest.mark.slow
def test_its_models_are_quantized_as_the_plain_ones(tmp_path):
    """In a process of its own: Liger's changes reach every model of a process."""
    environment = with_packages("liger", "liger_kernel", tmp_path)
    done = subprocess.run([sys.executable, "-c", LAYERS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
