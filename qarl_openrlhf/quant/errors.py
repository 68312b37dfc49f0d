"""The one error of quantization."""


class QuantError(ValueError):
    """A scheme, layer or tensor that cannot be quantized; the message names it and says what would work."""
