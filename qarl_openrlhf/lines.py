"""Files of one JSON object a line, also while another process writes them or after it was killed at it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qarl_openrlhf.files import atomic_file


def read_lines(path: str | os.PathLike) -> list[str]:
    r"""All lines; the last one may be unfinished.

    Split at "\n" alone: ``str.splitlines`` would also split at U+2028 and its like, which our writers leave as they are inside
    strings. A character that a kill cut in two becomes U+FFFD, as do bytes that are no UTF-8: they spoil their own line at most.
    """
    lines = Path(path).read_bytes().decode("utf-8", errors="replace").split("\n")
    return lines if lines[-1] else lines[:-1]


def write_jsonl(path: str | os.PathLike, rows: list[dict]) -> None:
    """Writes rows as JSON lines; the file appears complete or not at all."""
    with atomic_file(path) as part, open(part, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_lines(path: str | os.PathLike, lines: list[str]) -> None:
    """Append lines (without their ends), after ending one that a killed process left unfinished: else the first would be lost."""
    with open(path, "ab+") as file:
        torn = file.tell() and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n"
        file.write(("\n" * bool(torn) + "".join(f"{line}\n" for line in lines)).encode("utf-8"))


def read_objects(path: str | os.PathLike) -> list[dict]:
    """The JSON objects of the lines that hold one; an unfinished line never does, its closing brace is missing."""
    found = []
    for line in read_lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
