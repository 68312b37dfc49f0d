"""Passes for which DeepSpeed does not gather what they do not read leave the model as it was."""

from collections import OrderedDict
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qarl_openrlhf.quant import ungathered as module
from qarl_openrlhf.quant.ungathered import ungathered


class Coordinator:
    def is_invalid_trace(self):
        return False

    def _invalidate_trace(self):
        pass


NAMES = ("gate_up_proj", "down_proj", "bias")


@pytest.mark.parametrize("away", [names for count in (1, 2, 3) for names in combinations(NAMES, count)], ids=" ".join)
@pytest.mark.parametrize("fails", [False, True])
def test_parameters_come_back_in_their_order(monkeypatch, away, fails):
    """Whichever of a block's are packed; the order is that of the optimizer's states and of a checkpoint."""
    block = nn.Module()
    block._parameters = OrderedDict((name, nn.Parameter(torch.zeros(2))) for name in NAMES)  # as DeepSpeed makes it
    before = dict(block._parameters)
    monkeypatch.setattr(module, "unread", lambda network: [(network, name) for name in away])
    offload = SimpleNamespace(param_coordinator=Coordinator())
    engine = SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))
    coordinator = offload.param_coordinator
    try:
        with torch.no_grad(), ungathered(engine, block) as count:
            assert count == len(away) and [name for name, _ in block.named_parameters()] == [n for n in NAMES if n not in away]
            assert all(getattr(block, name) is before[name] for name in NAMES)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert list(block._parameters) == list(NAMES) and all(block._parameters[name] is before[name] for name in NAMES)
    assert not set(NAMES) & set(block.__dict__) and offload.param_coordinator is coordinator
