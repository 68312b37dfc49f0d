"""``checkpoint.json`` in a checkpoint's directory: its files with sizes and checksums. A directory that has it is complete."""

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qarl_openrlhf.files import atomic_file

NAME = "checkpoint.json"
PARTIAL = ".partial"  # ending of a directory that is being written, or removed
_CHUNK = 1 << 24


def files_of(directory: Path) -> list[str]:
    """Relative names of a checkpoint's files, sorted; the manifest is not one of them."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in found if name != NAME)


def describe(directory: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, dict]:
    """{name: {"bytes", "crc32"}} of files; ``sync`` also waits until the disk has them."""

    def one(name: str) -> dict:
        crc = size = 0
        with open(directory / name, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            while block := file.read(_CHUNK):
                crc = zlib.crc32(block, crc)
                size += len(block)
        return {"bytes": size, "crc32": crc}

    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # crc32 releases the GIL
        return dict(zip(names, pool.map(one, names), strict=True))


def write(directory: Path, files: dict[str, dict], facts: dict) -> None:
    """Last act of writing a checkpoint. facts: what a reader must know to use it ("zero_stage", "world_size", ...)."""
    with atomic_file(directory / NAME) as path:
        path.write_text(json.dumps({"format": 1, **facts, "files": files}, indent=1, sort_keys=True), encoding="utf-8")


def read(directory: Path) -> dict | None:
    """The manifest; None if there is none, or none that can be read."""
    try:
        manifest = json.loads((directory / NAME).read_text(encoding="utf-8"))
        return manifest if isinstance(manifest["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def problem(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, naming the file; None if every file has the bytes that were written."""
    manifest = read(directory)
    if manifest is None:
        return f"{directory / NAME} is missing or broken: the checkpoint was never finished"
    for name, written in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != written["bytes"]:
            return f"{path} has {path.stat().st_size} bytes, {written['bytes']} were written"
    for name, found in describe(directory, manifest["files"]).items():
        if found != manifest["files"][name]:
            return f"{directory / name} does not hold the bytes that were written (checksum)"
    return None
