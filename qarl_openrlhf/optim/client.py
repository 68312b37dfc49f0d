"""An optimizer of ours where OpenRLHF has DeepSpeed make its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import torch


@contextmanager
def in_place_of_deepspeeds(make: Callable[..., torch.optim.Optimizer], bind: Callable | None = None, **settings) -> Iterator[None]:
    """Within it ``deepspeed.initialize`` takes ``make(model, model_parameters, config)``, whatever optimizer its config names.

    OpenRLHF calls it with ``optimizer=None`` in the middle of a long method; this is the one argument that must differ.
    bind: called with the optimizer and DeepSpeed's around it, once that is made. settings: of DeepSpeed's config.
    """
    initialize = deepspeed.initialize

    def with_ours(*, model, config, optimizer=None, model_parameters=None, **kwargs):
        ours = make(model, model_parameters, config)
        config = {key: value for key, value in config.items() if key != "optimizer"}
        # DeepSpeed asks for the first before it takes an optimizer that it does not know.
        config |= {"zero_allow_untested_optimizer": True, **settings}
        made = initialize(model=model, optimizer=ours, config=config, **kwargs)
        if bind:
            bind(ours, made[1])
        return made

    deepspeed.initialize = with_ours
    try:
        yield
    finally:
        deepspeed.initialize = initialize
