"""The config.json of a model directory, or why there is none."""

from qarl_openrlhf.quant.errors import QuantError


def read_config(directory: str):
    """The Hugging Face config of a directory or hub model. QuantError without a config.json that can be read."""
    from transformers import AutoConfig  # seconds, which whoever asks for a scheme by name need not wait

    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:  # no file, no JSON, values of the wrong kind, an unknown architecture: many classes
        raise QuantError(f"{directory} has no config.json that transformers reads: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """"Class: message" of an error whose message may be pages."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
