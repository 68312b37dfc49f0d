"""AdamW with 8-bit moments (bitsandbytes, arXiv 2110.02861) under DeepSpeed's ZeRO.

DeepSpeed has no name for it in its config, but takes a client optimizer: it averages, accumulates and clips the gradients and
calls ``step`` with its flat float32 partitions, whose moments bitsandbytes keeps as 8-bit codes with one float32 scale in 256.
Master weights stay float32. Partitions of fewer than 4096 numbers keep float32 moments.
"""

from qarl_openrlhf.optim import client


def in_place_of_deepspeeds(adam: dict):
    """Within it ``deepspeed.initialize`` builds bitsandbytes' AdamW8bit, see :mod:`qarl_openrlhf.optim.client`."""
    from bitsandbytes.optim import AdamW8bit

    def make(model, parameters, config) -> AdamW8bit:
        return AdamW8bit(parameters, lr=adam["lr"], betas=tuple(adam["betas"]), eps=adam["eps"], weight_decay=adam["weight_decay"])

    return client.in_place_of_deepspeeds(make)
