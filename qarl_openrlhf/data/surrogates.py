"""Half of a surrogate pair: JSON can write it ("\\ud800"), and no tokenizer, file or data set takes it."""


def half_surrogate(text: str) -> tuple[str, int] | None:
    """(its escape, its index) of the first in a text; None where every character is one."""
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}", error.start
    return None
