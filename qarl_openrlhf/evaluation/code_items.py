"""LiveCodeBench: rows of its data set -> items, the program in a response, and whether its output is the expected one.

Columns, as in livecodebench/code_generation_lite: question_id, question_content, starter_code (empty where the program reads
stdin), public_test_cases (JSON), private_test_cases (JSON, or base64 of zlib of a pickled string of JSON) and metadata (JSON,
with func_name where a function is called). A test: {"input", "output", "testtype": "stdin" or "functional"}; a functional input
has one JSON value a line, one an argument.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import re
import zlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from qarl_openrlhf.data.math_rows import require_text
from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.evaluation.items import Item

COLUMNS = ("question_id", "question_content", "public_test_cases", "private_test_cases")
# Ours. Part of an item's problem, so that samples of another prompt are not taken for these.
STDIN_PROMPT = """Write a Python program that solves the problem below. It reads the input from standard input and writes the answer \
to standard output. Think first, then give the whole program in one block that begins with ```python and ends with ```.

{problem}"""
FUNCTION_PROMPT = """Write Python code that solves the problem below. Complete this code and keep its names; it is called with \
the arguments of each test. Think first, then give the whole code in one block that begins with ```python and ends with ```.

```python
{starter}
```

{problem}"""
# A block of any language, so that none is entered at its end. A line that opens another one within it shows that it was not closed.
BLOCK = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^`\n]*\n((?:(?![ \t]*```)[^\n]*\n)*)[ \t]*```[ \t]*$", re.M)
PYTHON = ("", "python", "python3", "py")


@dataclass(frozen=True)
class Test:
    """stdin: what the program reads and must print; functional: arguments a line, and what must be returned, as JSON."""

    input: str
    output: str

    def arguments(self) -> list:
        """Of a functional test."""
        return [json.loads(line) for line in self.input.split("\n") if line.strip()]


@dataclass(frozen=True)
class CodeItem(Item):
    """problem: the whole prompt, which no template is put around; label: how many tests, and a digest of them.

    function: name of the function that is called, None for a program that reads stdin; tests: the two columns, still encoded
    (all sets together hold gigabytes of tests); where: file and row, for messages.
    """

    function: str | None = None
    tests: tuple[str, str] = ("[]", "[]")
    where: str = ""

    def prompt(self, template: str) -> str:
        return self.problem

    def read_tests(self) -> list[Test]:
        """DataError naming file, row and column where they are broken."""
        tests = []
        for column, text in zip(COLUMNS[2:], self.tests, strict=True):
            found = decode_tests(text, f"{self.where}, {column}")
            for number, test in enumerate(found if self.function else [], 1):
                _check_functional(test, f"{self.where}, {column}, test {number}")
            tests += found
        return tests


def is_code(rows: list[dict]) -> bool:
    return bool(rows) and "public_test_cases" in rows[0]


def code_items(name: str, rows: list[dict], place: str) -> list[CodeItem]:
    """place: where the rows are from. DataError names it, the row and the column."""
    return [_item(name, index, row, f"{place}, row {index + 1}") for index, row in enumerate(rows)]


def _item(name: str, index: int, row: dict, where: str) -> CodeItem:
    if missing := [column for column in COLUMNS if not isinstance(row.get(column), str) or not row[column]]:
        raise DataError(
            f"{where} has no text in {', '.join(missing)}; LiveCodeBench's columns are {', '.join(COLUMNS)}, metadata"
        )
    for column in (*COLUMNS, "starter_code"):
        require_text(row.get(column) or "", f"{where}: {column}")
    public = decode_tests(row["public_test_cases"], f"{where}, public_test_cases")
    try:
        function = json.loads(row.get("metadata") or "{}").get("func_name")
    except (ValueError, AttributeError):
        raise DataError(f"{where}: metadata is no JSON object") from None
    starter = row.get("starter_code") or ""
    prompt = FUNCTION_PROMPT if function else STDIN_PROMPT
    problem = prompt.format(problem=row["question_content"].strip(), starter=starter.strip("\n"))
    tests = (row["public_test_cases"], row["private_test_cases"])
    digest = hashlib.sha256("\0".join(tests).encode()).hexdigest()[:16]
    label = f"{row['question_id']}: {len(public)} public tests, all tests sha256 {digest}"
    return CodeItem(name, index, problem, label, function, tests, where)


class _StringOnly(pickle.Unpickler):
    """A pickle that holds a string needs no class; one that asks for any is an attack or another format."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"asks for {module}.{name}")


def decode_tests(text: str, where: str) -> list[Test]:
    try:
        if not text.lstrip().startswith("["):
            text = _StringOnly(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
        tests = [Test(row["input"], row["output"]) for row in json.loads(text)]
        for part in (part for test in tests for part in (test.input, test.output)):
            require_text(part, where)
        return tests
    except DataError:
        raise
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(
            f"{where}: no tests as LiveCodeBench writes them ({type(error).__name__}: {str(error)[:100]})"
        ) from None


def _check_functional(test: Test, where: str) -> None:
    """DataError for values that are no JSON: of an input, no program could be run; with an output, all would be wrong."""
    for name, read in (("input", test.arguments), ("output", lambda: json.loads(test.output))):
        try:
            read()
        except (ValueError, RecursionError) as error:
            wanted = "one JSON value a line" if name == "input" else "a JSON value"
            raise DataError(f"{where}: {name} {getattr(test, name)[:60]!r} is not {wanted} ({str(error)[:100]})") from None


def find_program(response: str) -> str | None:
    """The last closed block of Python, or of no named language, after the thinking; None without one."""
    if "</think>" in response:
        response = response.rsplit("</think>", 1)[1]
    elif "<think>" in response:
        return None
    blocks = [code for language, code in BLOCK.findall(response) if language.lower() in PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def same_output(written: str, expected: str) -> bool:
    """Equal line by line, white space at the ends apart; lines of numbers by value (1.50 is 1.5)."""
    mine, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (written, expected))
    return len(mine) == len(theirs) and all(a == b or _same_numbers(a, b) for a, b in zip(mine, theirs, strict=True))


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False


def same_value(written: str, expected: str) -> bool:
    """Equal as JSON values (tuples have become lists)."""
    try:
        return json.loads(written) == json.loads(expected)
    except ValueError:
        return False
