"""The rows of one local prompt file, read as far as seconds allow, and the two columns that training takes from each."""

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator

from qarl_openrlhf.config import ConfigError

LIMIT = 200_000  # rows that are looked at, about two seconds; the rest of a larger file is only counted


def count_rows(owner: str, path: str, data, columns: dict[str, type] | None = None) -> int | None:
    """Rows of ``path``; None where a format is not counted. ConfigError for the first row that cannot be used.

    Args:
        owner: flag and file, for messages; data: the ``--data.*`` arguments; columns: filled with the type of each key of a JSON
        file whose values are all text, all whole numbers or all truth values.
    """
    kind = path.rsplit(".", 1)[1]
    if kind == "arrow":
        return None
    if kind == "parquet":
        return _parquet(owner, path, data)
    checker = RowChecker(owner, data)
    types: dict[str, set[type]] = {}
    count = 0
    try:
        for count, (place, row) in enumerate(rows_of(owner, path), 1):
            if row is not None:
                checker.check(place, row)
                for key, value in row.items():
                    types.setdefault(key, set()).add(type(value))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{owner} cannot be read after row {count}: {error}; save it as UTF-8") from None
    if columns is not None and kind != "csv":
        found = {key: seen - {type(None)} for key, seen in types.items()}
        columns |= {key: seen.pop() for key, seen in found.items() if len(seen) == 1 and seen <= {str, int, bool}}
    return count


def rows_of(owner: str, path: str) -> Iterator[tuple[str, object]]:
    """(where, row) of a .json, .jsonl or .csv file; row None past the limit. ConfigError for a line that is no JSON."""
    return _csv(path) if path.endswith(".csv") else _json(owner, path)


class RowChecker:
    """Checks rows one after the other: the prompt is text (or messages), the label is there and of one type in all rows."""

    def __init__(self, owner: str, data):
        self.owner, self.data = owner, data
        self.label_type: type | None = None

    def check(self, place: str, row) -> None:
        where = f"{self.owner}, {place}"
        if not isinstance(row, dict):
            raise ConfigError(f'{where}: a {type(row).__name__}; each row must be an object such as {{"{self.data.input_key}": "..."}}')
        self._check_prompt(where, self._value(where, row, "input_key"))
        if self.data.label_key is not None:
            self._check_label(where, self._value(where, row, "label_key"))

    def _value(self, where: str, row: dict, flag: str):
        key = getattr(self.data, flag)
        if key not in row:
            raise ConfigError(f"{where} has no key {key!r} (--data.{flag}); it has {', '.join(map(repr, row)) or 'none'}")
        return row[key]

    def _check_prompt(self, where: str, value) -> None:
        chat = self.data.apply_chat_template
        if chat and isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
            return
        if not isinstance(value, str):
            other = ", or a list of messages with role and content" if chat else ""
            raise ConfigError(f"{where}: {self.data.input_key!r} is {_shown(value)}; a prompt must be a string{other}")
        if not value and not chat and not self.data.input_template:
            raise ConfigError(f"{where}: {self.data.input_key!r} is empty, and the engine takes no empty prompt: remove the row")

    def _check_label(self, where: str, value) -> None:
        key = self.data.label_key
        if value is None:
            raise ConfigError(f"{where}: {key!r} is null: give the label, as a string")
        kind = float if type(value) is int else type(value)
        if self.label_type not in (None, kind):
            # one column of a data set has one type
            raise ConfigError(f"{where}: {key!r} is {_shown(value)}, and the rows above have another type: use strings everywhere")
        self.label_type = kind


def _json(owner: str, path: str) -> Iterator[tuple[str, object]]:
    """(where, row) of an array of objects or of one object a line; row None past the limit."""
    with open(path, "rb") as file:
        begin = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0  # the data sets' loader leaves one out, too
        file.seek(begin)
        if file.read(256).lstrip()[:1] == b"[":
            file.seek(begin)
            try:
                for number, row in enumerate(json.loads(file.read()), 1):
                    yield f"row {number}", row
                return
            except json.JSONDecodeError:
                pass  # then its lines are arrays, which the checker refuses
        file.seek(begin)
        rows = 0
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            rows += 1
            if rows > LIMIT:
                yield f"line {number}", None
                continue
            try:
                yield f"line {number}", json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{owner}, line {number} is not UTF-8 ({error.reason}): save the file as UTF-8") from None
            except ValueError as error:
                raise ConfigError(f"{owner}, line {number} is not JSON: {error}; write one object a line") from None


def _csv(path: str) -> Iterator[tuple[str, object]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 1):
            yield f"row {number}", row if number <= LIMIT else None


def _parquet(owner: str, path: str, data) -> int:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names, count = file.schema_arrow.names, file.metadata.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{owner} is not a parquet file: {error}") from None
    for flag, key in (("input_key", data.input_key), ("label_key", data.label_key)):
        if key is not None and key not in names:
            raise ConfigError(f"{owner} has no column {key!r} (--data.{flag}); it has {', '.join(map(repr, names))}")
    return count


def _shown(value) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
