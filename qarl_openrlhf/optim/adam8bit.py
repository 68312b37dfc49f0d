"""AdamW with 8-bit moments (bitsandbytes, arXiv 2110.02861) under DeepSpeed's ZeRO.

DeepSpeed has no name for it in its config, but takes a client optimizer: it averages, accumulates and clips the gradients and
calls ``step`` with its flat float32 partitions, whose moments bitsandbytes keeps as 8-bit codes with one float32 scale in 256.
Master weights stay float32. Partitions of fewer than 4096 numbers keep float32 moments.
"""

from contextlib import contextmanager

import deepspeed


@contextmanager
def in_place_of_deepspeeds(adam: dict):
    """Within it ``deepspeed.initialize`` builds bitsandbytes' AdamW8bit, whatever optimizer its config names.

    OpenRLHF calls it with ``optimizer=None`` in the middle of a long method; this is the one argument that must differ.
    """
    from bitsandbytes.optim import AdamW8bit

    initialize = deepspeed.initialize

    def with_8bit_moments(*, model, config, model_parameters, optimizer=None, **kwargs):
        ours = AdamW8bit(
            model_parameters, lr=adam["lr"], betas=tuple(adam["betas"]), eps=adam["eps"], weight_decay=adam["weight_decay"]
        )
        config = {key: value for key, value in config.items() if key != "optimizer"}
        config |= {"zero_allow_untested_optimizer": True}  # DeepSpeed asks for it before it takes an optimizer it does not know
        return initialize(model=model, optimizer=ours, config=config, **kwargs)

    deepspeed.initialize = with_8bit_moments
    try:
        yield
    finally:
        deepspeed.initialize = initialize
