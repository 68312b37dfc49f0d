"""One row of any of the known mathematics sets -> (problem, label), by the columns it has.

| column | in |
|---|---|
| problem / question / input | the problem: AIME, MATH-500, NuminaMath / AMC, Minerva, OlympiadBench; the data sets of the README |
| prompt | OpenR1-Math-46K: chat messages, whose last user message is the problem; a plain string is one, too |
| answer | the label; an integer, a float like 27.0 (AMC) or LaTeX |
| final_answer | OlympiadBench: a list of answers, each maybe in dollars; all of them are wanted |
| reward_model | OpenR1-Math-46K: {"ground_truth": label} |
| label | files that `prepare_data` wrote |
| solution | where nothing else is there: its last \\boxed{} |
"""

from __future__ import annotations

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.data.surrogates import half_surrogate
from qarl_openrlhf.rewards.answers import boxed

PROBLEM_COLUMNS = ("problem", "question", "prompt", "input")
LABEL_COLUMNS = ("label", "final_answer", "answer", "reward_model", "solution")


def problem_and_label(row: dict, where: str, problem_key: str | None = None, label_key: str | None = None) -> tuple[str, str]:
    """DataError naming `where` (file and row number) and the columns that are there. The keys: take this column and no other."""
    problem_columns = (problem_key,) if problem_key is not None else PROBLEM_COLUMNS
    label_columns = (label_key,) if label_key is not None else LABEL_COLUMNS
    problem = next((text for column in problem_columns if (text := _problem(row.get(column)))), None)
    label = next((text for column in label_columns if (text := _label(column, row.get(column)))), None)
    if problem is None or label is None:
        missing, wanted = ("problem", problem_columns) if problem is None else ("label", label_columns)
        raise DataError(f"{where} has no {missing}: none of {', '.join(wanted)} is filled; its columns are {', '.join(row)}")
    require_text(problem, f"{where}: the problem")
    require_text(label, f"{where}: the label")
    return problem, label


def require_text(text: str, what: str) -> None:
    """DataError for half of a surrogate pair."""
    if found := half_surrogate(text):
        raise DataError(f"{what} has {found[0]} at character {found[1] + 1}, half of a surrogate pair, which is no text: replace it")


def _problem(value) -> str:
    if isinstance(value, list):  # chat messages
        said = [message.get("content") for message in value if isinstance(message, dict) and message.get("role") == "user"]
        value = said[-1] if said else ""
    return value.strip() if isinstance(value, str) else ""


def _label(column: str, value) -> str:
    if column == "reward_model" and isinstance(value, dict):
        value = value.get("ground_truth")
    if isinstance(value, list):
        return ", ".join(filter(None, (_label(column, each) for each in value)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value).strip()
    if column == "solution":
        return boxed(text) or ""
    if text.startswith("$") and text.endswith("$") and text.count("$") == 2:
        text = text[1:-1].strip()
    return text
