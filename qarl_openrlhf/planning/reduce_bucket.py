"""Gradients that DeepSpeed collects before it sends them to the ranks that keep them."""

DEEPSPEED_DEFAULT = 500_000_000


def reduce_bucket(weights: int) -> int:
    """Gradients of a bucket for a model of ``weights`` trained weights.

    DeepSpeed allocates the whole bucket, under ZeRO-3 for the whole run: more than the model's gradients would never be filled.
    """
    return min(DEEPSPEED_DEFAULT, weights)
