"""Results on disk: one line an item, written when all of its samples are judged, so that a run that was stopped goes on.

    DIR/settings.json    what the samples depend on; a resumed run must have the same
    DIR/TASK.jsonl       {"index", "problem", "label", "samples": [{"right", "answer", "verdict", "tokens", "finish", "text"}]}
    DIR/summary.json     scores by task
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.evaluation.items import Item, Settings
from qarl_openrlhf.evaluation.scores import figure
from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.lines import append_lines, read_objects


@contextmanager
def unclaimed_without_samples(directory: Path) -> Iterator[None]:
    """If the block raises before anything is sampled, no settings stay that would refuse other ones."""
    path = directory / "settings.json"
    before = path.exists()
    try:
        yield
    except BaseException:
        if not before and not any(directory.glob("*.jsonl")):
            path.unlink(missing_ok=True)
        raise


def claim(directory: Path, settings: Settings, names: tuple[str, ...] | None = None) -> None:
    """Write settings.json, or find the same there; DataError names what differs. names: of those that count (default: all)."""
    path = directory / "settings.json"
    now = {name: value for name, value in settings.to_dict().items() if names is None or name in names}
    before = _read_json(path, "remove --out, or choose another directory") if path.is_file() else {}
    changed = [f"{key} {before[key]!r}, now {now[key]!r}" for key in now if key in before and before[key] != now[key]]
    if changed:
        raise DataError(f"--out {directory} holds samples made otherwise ({'; '.join(changed)}): choose another directory")
    write_json(path, before | now)


def read_summary(path: Path) -> dict[str, dict]:
    """{task: scores} of a summary.json; DataError for anything else."""
    remedy = "remove it: the same evaluate command writes it anew from the samples"
    tasks = _read_json(path, remedy).get("tasks")
    try:
        if tasks and all(math.isfinite(figure(scores)[1]) for scores in tasks.values()):
            return tasks
    except (AttributeError, KeyError, TypeError):  # what is no object, or lacks a score or has one that is no number
        pass
    raise DataError(f"{path} holds no scores of tasks, as evaluate writes them: {remedy}")


def _read_json(path: Path, remedy: str) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, no UTF-8
        raise DataError(f"{path} is broken ({error}): {remedy}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is broken (no JSON object, but a {type(content).__name__}): {remedy}")
    return content


def write_json(path: Path, content: dict) -> None:
    with atomic_file(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Records:
    """The file of one task."""

    def __init__(self, directory: Path, task: str):
        self.path = directory / f"{task}.jsonl"

    def read(self) -> dict[int, dict]:
        """{index: record}; a line that was cut off (the process was killed), or is no record, counts as not there."""
        rows = read_objects(self.path) if self.path.is_file() else []
        return {row["index"]: row for row in rows if row.keys() >= {"index", "problem", "label", "samples"}}

    def done(self, items: list[Item], k: int) -> dict[int, dict]:
        """Records that stand: of these items, with at least k samples. DataError if the set itself has changed."""
        records = self.read()
        for item in items:
            record = records.get(item.index)
            if record and (record["problem"], record["label"]) != (item.problem, item.label):
                raise DataError(f"{self.path}, item {item.index} is another problem than the set's now: choose another --out")
        wanted = {item.index for item in items}
        return {index: record for index, record in records.items() if index in wanted and len(record["samples"]) >= k}

    def append(self, records: list[dict]) -> None:
        append_lines(self.path, [json.dumps(record, ensure_ascii=False) for record in records])
