"""Is an answer the label? math-verify compares mathematics; what it would misread (words, choices, sets against ordered
pairs) is decided here first. Runs inside a worker process (`rewards/pool.py`): nothing here has a time limit of its own.
"""

from __future__ import annotations

import logging
import re

CHOICE = re.compile(r"\(?([A-J])\)?(?:[.:)]\s.*)?\Z", re.S)
UNIT_TAIL = re.compile(r"(?<=[\d})])\s*(?:\\text|\\mathrm|\\mbox)\{[^{}]*\}(?:\^\{?\d\}?)?\s*\.?\Z")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|big|Big|bigl|bigr)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|~")
SPACED_NUMBERS = re.compile(r"[-+\d.\s]*\d\s+\d(?!\d\d(?!\d))[\d.\s]*\Z")  # 4 2, but not 12 345
WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]+\Z")
SCIENTIFIC = re.compile(r"([-+]?\d*\.?\d+)[eE]([-+]?\d{1,3})")
WORD_IN_TEXT = re.compile(r"[A-Za-z]{2,}")


def tidy(text: str) -> str:
    """LaTeX without what changes nothing: dollars, spacing commands, fraction variants, a final period; 1e3 as a power of ten."""
    text = SPACING.sub("", text.strip().strip("$")).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").strip()
    text = text[:-1].rstrip() if text.endswith(".") else text
    power = SCIENTIFIC.fullmatch(text)  # math-verify reads the e of 4.5e33 (Minerva's labels) as Euler's number
    return f"{power[1]}\\times 10^{{{int(power[2])}}}" if power else text


def words(text: str) -> str | None:
    """'\\text{Even}' or 'even' -> 'even'; None for what is no text. One letter is a symbol, not a word."""
    bare = " ".join(TEXT.sub(r"\1", text).split())
    return bare.casefold() if "\\" not in bare and WORDS.match(bare) and len(bare) > 1 else None


def choice(label: str) -> str | None:
    """The letter of a multiple-choice label: (C), \\text{(C)}, \\text{C}, but not a bare C, which may be a symbol."""
    match = re.fullmatch(r"(?:\\text\w*|\\mathrm|\\mathbf)\{\s*\(?([A-J])\)?\s*\}|\(([A-J])\)", label)
    return (match[1] or match[2]) if match else None


def shape(text: str) -> str:
    """'set', 'ordered' (parentheses with commas) or 'other': math-verify lets {1,2} pass for (2,1)."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set"
    inside = text[1:-1]
    if text[:1] == "(" and text[-1:] == ")" and "," in inside and not re.search(r"[()\[\]]", inside):
        return "ordered"
    return "other"


def is_right(answer: str, label: str) -> bool:
    """True if the mathematics of `answer` is that of `label` (both text, LaTeX or plain)."""
    answer, label = tidy(answer), tidy(label)
    if SPACED_NUMBERS.match(answer) and not SPACED_NUMBERS.match(label):
        return False  # "4 2" would be read as 42
    if re.sub(r"\s", "", answer) == re.sub(r"\s", "", label):
        return True
    letter = choice(label)
    if letter is not None:
        given = CHOICE.match(TEXT.sub(r"\1", answer).strip())
        return given is not None and given[1] == letter
    word = words(label)
    if word is not None:  # math-verify reads "even" as a product of four symbols
        return words(answer) == word
    if {shape(answer), shape(label)} == {"set", "ordered"}:
        return False
    return _verify(answer, label)


def _verify(answer: str, label: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own time limit is off: the pool has one
    formulas = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", formulas, fallback_mode="no_fallback", parsing_timeout=None)

    gold = read(label)
    if verify(gold, read(answer), timeout_seconds=None):
        return True
    without_unit = UNIT_TAIL.sub("", answer)
    if without_unit != answer and not WORD_IN_TEXT.search(without_unit.replace("\\", " \\")) and verify(
        gold, read(without_unit), timeout_seconds=None
    ):
        return True
    if "\\" in answer or not WORD_IN_TEXT.search(answer) or len(re.findall(r"\d[\d.,/]*", answer)) != 1:
        return False
    # "5 apples", "so there are 42 of them": a sentence with one number in it
    number = parse(answer, [ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return bool(number) and verify(gold, number, timeout_seconds=None)
