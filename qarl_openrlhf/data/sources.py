"""The paper's data sets: where they lie on the Hugging Face hub, and how rows are read from there or from a local file."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qarl_openrlhf.data.reasoning_gym import DataError

if TYPE_CHECKING:
    from qarl_openrlhf.preflight.hub import Wanted


@dataclass(frozen=True)
class Source:
    """A data set on the hub; config None: it has only one. files: read these and no other, where it has a loading script, which
    `datasets` no longer runs."""

    name: str
    hub: str
    split: str
    config: str | None = None
    files: tuple[str, ...] = ()


TRAIN = {"openr1-math-46k": Source("openr1-math-46k", "Elliott/Openr1-Math-46k-8192", "train")}
EVAL = {
    source.name: source
    for source in (
        Source("aime24", "HuggingFaceH4/aime_2024", "train"),
        Source("aime25", "math-ai/aime25", "test"),
        Source("amc23", "math-ai/amc23", "test"),
        Source("math500", "HuggingFaceH4/MATH-500", "test"),
        Source("minerva", "math-ai/minervamath", "test"),
        Source("olympiadbench", "Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP"),
    )
}
# All problems up to April 2025 (release_v6), a file a release.
_LIVECODEBENCH = tuple(f"test{release}.jsonl" for release in ("", "2", "3", "4", "5", "6"))
CODE = {"livecodebench": Source("livecodebench", "livecodebench/code_generation_lite", "test", files=_LIVECODEBENCH)}
FORMATS = (".jsonl", ".json", ".parquet", ".csv")


def on_hub(argument: str, known: dict[str, Source], flag: str) -> list[Wanted]:
    """[what `load_rows` would take from the hub], for `hub.settle_names`; [] for files."""
    if argument not in known:
        return []
    from qarl_openrlhf.preflight.hub import Wanted  # imports torch

    remedy = f"with its files on this machine write {flag} {argument}=FILE ({', '.join(FORMATS)})"
    return [Wanted(flag, "datasets", known[argument].hub, remedy, shown=argument)]


def place_of(argument: str, known: dict[str, Source]) -> str:
    """Where the rows of `load_rows` come from, for messages: the path of a file, or the name of a set on the hub."""
    return argument if argument in known else argument.partition("=")[2] or argument


def load_rows(argument: str, known: dict[str, Source], flag: str) -> tuple[str, list[dict]]:
    """'NAME', 'NAME=FILE' or 'FILE' -> (name, rows as in the data set). DataError names the flag and what would work."""
    name, _, path = argument.partition("=") if "=" in argument else ("", "", argument)
    if not name and argument in known:
        return argument, _from_hub(known[argument], flag)
    if not Path(path).is_file():
        raise DataError(f"{flag} {argument}: neither a file nor one of {', '.join(known)}; write NAME, FILE or NAME=FILE")
    name = name or Path(path).stem
    if name != Path(name).name:
        raise DataError(f"{flag} {argument}: {name} names a file to write: leave slashes out of it")
    return name, read_file(path)


def _from_hub(source: Source, flag: str) -> list[dict]:
    from datasets import load_dataset
    from huggingface_hub import hf_hub_download

    try:
        if source.files:
            paths = [hf_hub_download(source.hub, file, repo_type="dataset") for file in source.files]
            return [row for path in paths for row in read_file(path)]
        return list(load_dataset(source.hub, source.config, split=source.split))
    except Exception as error:  # offline, gated, renamed: many classes
        raise DataError(
            f"{flag} {source.name}: {source.hub} cannot be loaded from the Hugging Face hub ({type(error).__name__}: "
            f"{str(error)[:200]}); with its files on this machine write {flag} {source.name}=FILE ({', '.join(FORMATS)})"
        ) from None


def read_file(path: str | Path) -> list[dict]:
    """Rows of a .jsonl, .json (a list), .parquet or .csv file."""
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.suffix == ".csv":
            return _csv(path)
        if path.suffix == ".json":
            rows = _json(path.read_bytes(), str(path))
            if not isinstance(rows, list):
                raise DataError(f"{path} holds no list of rows; a .json file must, a .jsonl file has one row a line")
            return [_object(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
        if path.suffix == ".jsonl":
            lines = [(f"{path}, line {number}", line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1)]
            return [_object(_json(line, where), where) for where, line in lines if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    raise DataError(f"{path}: the ending '{path.suffix}' is not known; there are {', '.join(FORMATS)}")


def _json(text: bytes, where: str):
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is no UTF-8 (byte {error.start}): write it anew in UTF-8") from None
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from None


def _object(row, where: str) -> dict:
    if not isinstance(row, dict):
        raise DataError(f"{where} is no JSON object with columns, but a {type(row).__name__}")
    return row


def _csv(path: Path) -> list[dict]:
    """Every cell is text, as it stands: 007 stays 007."""
    csv.field_size_limit(sys.maxsize)  # a cell may hold a long text; by default 128 KiB
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if twice := [name for name in names if names.count(name) > 1]:
                raise DataError(f"{path} has column {twice[0]!r} twice: leave one of them out")
            rows = []
            for number, row in enumerate(reader, 1):
                if None in row:
                    raise DataError(f"{path}, row {number} has more cells than the header has names: put text with commas between quotes")
                rows.append(row)
            return rows
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 (byte {error.start}): write it anew in UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path} is no CSV file: {error}; put text with commas or line breaks between quotes, or use .jsonl") from None


def _parquet(path: Path) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no parquet file that pyarrow reads: {str(error).splitlines()[0]}") from None
