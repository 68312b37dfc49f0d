"""Types of command line arguments that several commands share."""

import argparse


def count(text: str) -> int:
    """A whole number of at least 1; ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1")
    return int(text)
