"""Small made copies of lm-eval's three data sets, laid out as on the hub and with its columns; sums, not knowledge."""

import csv
from pathlib import Path

import pyarrow
import pyarrow.parquet

SUBJECTS = (
    "biology business chemistry computer_science economics engineering health history law math other philosophy physics psychology"
).split()


def write_copies(root: Path) -> dict[str, str]:
    """{our task name: directory}"""
    for write in (_arc, _gpqa, _mmlu_pro):
        write(root)
    return {"arc-c": str(root / "ai2_arc"), "gpqa-diamond": str(root / "gpqa"), "mmlu-pro": str(root / "MMLU-Pro")}


def _arc(root: Path) -> None:
    rows = [
        {
            "id": f"made_{i}", "question": f"What is {i} plus 1?", "answerKey": "A",
            "choices": {"text": [str(i + 1), str(i + 5), "a cat", "the sea"], "label": ["A", "B", "C", "D"]},
        }
        for i in range(34)
    ]  # fmt: skip
    splits = {"train": rows[:28], "validation": rows[28:30], "test": rows[30:]}
    for split, part in splits.items():
        _parquet(root / "ai2_arc" / "ARC-Challenge" / f"{split}-00000-of-00001.parquet", part)
    _card(root / "ai2_arc", "ARC-Challenge", {split: f"ARC-Challenge/{split}-*" for split in splits})


def _gpqa(root: Path) -> None:
    (root / "gpqa").mkdir(parents=True)
    columns = [
        "Question",
        "Correct Answer",
        "Incorrect Answer 1",
        "Incorrect Answer 2",
        "Incorrect Answer 3",
        "Subdomain",
        "Record ID",
    ]
    with open(root / "gpqa" / "gpqa_diamond.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(
            [f"What is {i} plus 1?", f"{i + 1} apples", f"{i + 2} apples", "a cat", "the sea", "sums", f"made_{i}"]
            for i in range(4)
        )
    _card(root / "gpqa", "gpqa_diamond", {"train": "gpqa_diamond.csv"})


def _mmlu_pro(root: Path) -> None:
    def row(i: int, subject: str) -> dict:
        return {
            "question_id": i, "question": f"What is {i} plus 1?", "options": [str(i + j) for j in range(10)], "answer": "B",
            "answer_index": 1, "cot_content": f"A: Let's think step by step. {i} plus 1 is {i + 1}. The answer is (B).",
            "category": subject.replace("_", " "), "src": "made",
        }  # fmt: skip

    for split, numbers in (("test", range(2)), ("validation", range(10, 15))):
        _parquet(root / "MMLU-Pro" / "data" / f"{split}-00000-of-00001.parquet", [row(i, s) for s in SUBJECTS for i in numbers])
    _card(root / "MMLU-Pro", "default", {"test": "data/test-*", "validation": "data/validation-*"})


def _parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _card(directory: Path, config: str, files: dict[str, str]) -> None:
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    lines += [line for split, path in files.items() for line in (f"  - split: {split}", f"    path: {path}")]
    (directory / "README.md").write_text("\n".join([*lines, "---", ""]))
