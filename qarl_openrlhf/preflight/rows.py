"""The rows of one local prompt file, read as far as seconds allow, and the two columns that training takes from each."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.data.surrogates import half_surrogate

LOOKED_INTO = ("json", "jsonl", "csv", "parquet")
LIMIT = 200_000  # rows that are looked at one by one, about two seconds; the rest of a larger file is only counted
UNREAD = object()  # stands for a row past the limit; a row may be null
CSV_ROWS = 10_000  # what the loader reads at a time, and has the types of a column from
CSV_NOTE = "the loader takes a CSV cell that is empty or reads NA, null, None or nan for none, and a column of numbers for numbers: use .jsonl"


def count_rows(owner: str, path: str, data, columns: dict[str, type] | None = None) -> int | None:
    """Rows of ``path``; None where a format is not counted. ConfigError for the first row that cannot be used.

    Args:
        owner: flag and file, for messages; data: the ``--data.*`` arguments; columns: filled with the type of each key of the file
        whose values are all text, all whole numbers or all truth values.
    """
    kind = path.rsplit(".", 1)[1]
    if kind not in LOOKED_INTO:
        return None
    if kind in ("csv", "parquet"):
        tables = _csv(owner, path) if kind == "csv" else _parquet(owner, path, data)
        with closing(tables):
            return _count_tables(RowChecker(owner, data, CSV_NOTE if kind == "csv" else ""), tables, columns)
    checker = RowChecker(owner, data)
    types: dict[str, set[type]] = {}
    count = 0
    try:
        for count, (place, row) in enumerate(_json(owner, path), 1):
            if row is not UNREAD:
                checker.check(place, row)
                for key, value in row.items():
                    types.setdefault(key, set()).add(type(value))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{owner} cannot be read after row {count}: {error}; save it as UTF-8") from None
    if columns is not None:
        found = {key: seen - {type(None)} for key, seen in types.items()}
        columns |= {key: seen.pop() for key, seen in found.items() if len(seen) == 1 and seen <= {str, int, bool}}
    return count


def check_read(owner: str, path: str) -> None:
    """ConfigError for a file that the loader could not read, whatever its rows hold."""
    kind = path.rsplit(".", 1)[1]
    nothing = SimpleNamespace(input_key=None, label_key=None)
    rows = _parquet(owner, path, nothing) if kind == "parquet" else rows_of(owner, path) if kind in LOOKED_INTO else ()
    for _ in rows:
        pass


def rows_of(owner: str, path: str) -> Iterator[tuple[str, object]]:
    """(where, row) of a .json, .jsonl or .csv file; row UNREAD past the limit. ConfigError for a line that is no JSON."""
    if not path.endswith(".csv"):
        yield from _json(owner, path)
        return
    rows = (row for table in _csv(owner, path) for row in table.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row if number <= LIMIT else UNREAD


class RowChecker:
    """Checks rows one after the other: the prompt is text (or messages), the label is there and of one type in all rows."""

    def __init__(self, owner: str, data, note: str = ""):
        """note: what the file's loader does to values, for messages."""
        self.owner, self.data = owner, data
        self.note = f" ({note})" if note else ""
        self.label_type: type | None = None

    def check(self, place: str, row) -> None:
        where = f"{self.owner}, {place}"
        if not isinstance(row, dict):
            kind = "null" if row is None else f"a {type(row).__name__}"
            raise ConfigError(f'{where}: {kind}; each row must be an object such as {{"{self.data.input_key}": "..."}}')
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
            raise ConfigError(f"{where}: {self.data.input_key!r} is {_shown(value)}; a prompt must be a string{other}{self.note}")
        if not value and not chat and not self.data.input_template:
            raise ConfigError(f"{where}: {self.data.input_key!r} is empty, and the engine takes no empty prompt: remove the row")

    def _check_label(self, where: str, value) -> None:
        key = self.data.label_key
        if value is None or value != value:  # the loader makes null of NaN
            raise ConfigError(f"{where}: {key!r} is null: give the label, as a string{self.note}")
        kind = float if type(value) is int else type(value)
        if self.label_type not in (None, kind):
            # one column of a data set has one type
            raise ConfigError(f"{where}: {key!r} is {_shown(value)}, and the rows above have another type: use strings everywhere")
        self.label_type = kind


def _json(owner: str, path: str) -> Iterator[tuple[str, object]]:
    """(where, row) of an array of objects or of one object a line; row UNREAD past the limit."""
    with open(path, "rb") as file:
        begin = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0  # the data sets' loader leaves one out, too
        file.seek(begin)
        if file.read(256).lstrip()[:1] == b"[":
            file.seek(begin)
            text = file.read()
            try:
                rows = json.loads(text)
            except json.JSONDecodeError:
                pass  # then its lines are arrays, which the checker refuses
            except RecursionError:
                raise ConfigError(f"{owner} is nested too deeply to be read: write one object a line") from None
            else:
                surrogates = _has_surrogates(text)
                for number, row in enumerate(rows, 1):
                    if surrogates:
                        _check_text(f"{owner}, row {number}", row)
                    yield f"row {number}", row
                return
        file.seek(begin)
        rows = 0
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            rows += 1
            if rows > LIMIT:
                yield f"line {number}", UNREAD
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{owner}, line {number} is not UTF-8 ({error.reason}): save the file as UTF-8") from None
            except ValueError as error:
                raise ConfigError(f"{owner}, line {number} is not JSON: {error}; write one object a line") from None
            except RecursionError:
                raise ConfigError(f"{owner}, line {number} is nested too deeply to be read: write one object a line") from None
            if _has_surrogates(line):
                _check_text(f"{owner}, line {number}", row)
            yield f"line {number}", row


def _has_surrogates(source: bytes) -> bool:
    """Whether a JSON text may have any, whole pairs or halves."""
    return b"\\ud" in source or b"\\uD" in source


def _check_text(where: str, row) -> None:
    """ConfigError for half of a surrogate pair anywhere in a row."""
    if found := half_surrogate(json.dumps(row, ensure_ascii=False)):
        raise ConfigError(f"{where} has {found[0]}, half of a surrogate pair, which is no character: remove it")


def _count_tables(checker: RowChecker, tables: Iterator, columns: dict[str, type] | None) -> int:
    """Rows of all the tables, whose types are those of the first; ConfigError for the first row that cannot be used."""
    import pyarrow

    plain = {pyarrow.string(): str, pyarrow.int64(): int, pyarrow.bool_(): bool}
    keys = [key for key in (checker.data.input_key, checker.data.label_key) if key is not None]
    count = 0
    for table in tables:
        if columns is not None and not count:
            columns |= {field.name: plain[field.type] for field in table.schema if field.type in plain}
        picked = table.select([key for key in keys if key in table.column_names])
        doubtful = {0} if table.num_rows else set()
        for column in picked.columns:
            doubtful |= set(_doubtful(column, max(LIMIT - count, 0)))
        for number in sorted(doubtful):
            row = picked.slice(number, 1).to_pylist()[0]
            checker.check(f"row {count + number + 1}", row if len(picked.columns) == len(set(keys)) else table.slice(number, 1).to_pylist()[0])
        count += table.num_rows
    return count


def _doubtful(column, limit: int) -> list[int]:
    """Which values of a column may be unusable: where its type does not tell, the first ``limit``."""
    import pyarrow
    from pyarrow import compute

    kind = column.type
    text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    if not text and not pyarrow.types.is_primitive(kind):
        return list(range(min(len(column), limit)))
    if text:
        return compute.indices_nonzero(compute.fill_null(compute.equal(column, ""), True)).to_pylist()
    return compute.indices_nonzero(compute.is_null(column, nan_is_null=True)).to_pylist()


def _csv(owner: str, path: str) -> Iterator:
    """Its rows as tables, read and given types as the loader does."""
    import pandas
    import pyarrow

    schema, count = None, 0
    try:
        with pandas.read_csv(path, chunksize=CSV_ROWS) as chunks:
            for chunk in chunks:
                if not isinstance(chunk.index, pandas.RangeIndex):
                    raise ConfigError(f"{owner}: its rows have more cells than the header has names: put text with commas between quotes")
                table = pyarrow.Table.from_pandas(chunk, preserve_index=False)
                schema = schema or table.schema
                yield table if table.schema.equals(schema) else table.cast(schema)
                count += len(chunk)
    except pandas.errors.EmptyDataError:
        return
    except UnicodeDecodeError as error:
        raise ConfigError(f"{owner} cannot be read after row {count}: {error}; save it as UTF-8") from None
    except (pandas.errors.ParserError, pyarrow.ArrowException) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{owner} cannot be read after row {count}: {what}; put text with commas between quotes, or use .jsonl") from None


def _parquet(owner: str, path: str, data) -> Iterator:
    """Prompts and labels as tables."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"{owner} has column {twice[0]!r} twice: leave one of them out")
            keys = []
            for flag, key in (("input_key", data.input_key), ("label_key", data.label_key)):
                if key is not None and key not in names:
                    raise ConfigError(f"{owner} has no column {key!r} (--data.{flag}); it has {', '.join(map(repr, names))}")
                keys += [key] if key is not None and key not in keys else []
            for batch in file.iter_batches(columns=keys):
                batch.validate(full=True)
                yield _plain_text(pyarrow.Table.from_batches([batch]).select(keys))
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{owner} is not a parquet file that can be read: {' '.join(str(error).split())}") from None


def _plain_text(table):
    """A dictionary's values, and views of text, as the columns that they stand for."""
    import pyarrow

    for place, field in enumerate(table.schema):
        kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
        kind = pyarrow.string() if pyarrow.types.is_string_view(kind) else kind
        if kind != field.type:
            table = table.set_column(place, field.name, table.column(place).cast(kind))
    return table


def _shown(value) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
