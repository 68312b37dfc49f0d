"""Where the response is in a decoded text, and where the answer is in a response: boxed, tagged, announced, or the end of it. No mathematics here.

The last \\boxed{...} wins; several boxes with nothing but commas and "and" between them are one answer. Otherwise, with
`answer="any"`, within the last <answer>...</answer>, or in all of the response without one: the text after the last "answer is",
"answer:" or "####", else the last formula of the last line, else that line. A response that opened <think> and never closed it has
no answer: what it holds is scratch work.
"""

from __future__ import annotations

import re
from itertools import accumulate
from unicodedata import combining, normalize

# OpenRLHF decodes with special tokens: an end-of-turn token is no part of the answer.
END_TOKEN = re.compile(r"<(?:[|｜][^<>|｜]{1,60}[|｜]|/s|end_of_turn|eos)>\Z")  # DeepSeek's bars are wide ones
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BETWEEN_BOXES = re.compile(r"(?:\$|,|;|\s|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\\[()\[\]]|\\q?quad)*\Z")
# GSM8K's mark, which stands in the last line, or before a number; else it is a heading of the fourth level.
ANNOUNCED = re.compile(r"(?:####(?=[ \t]*[-+−*$\\(\[{.\d]|[^\n]+\Z)|\banswers?\s*(?:is|are|:|=)\s*:?|\banswer\b\*\*:?)", re.I)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)

MAX_ANSWER_CHARS = 1000  # a longer "answer" is text; judging it would cost seconds
TAIL_CHARS = 4000  # how far from the end a plain answer is looked for
LEAST_PROMPT = 8  # characters that must be left of a cut prompt: fewer may begin another text by chance


def response_of(query: str, prompt: str) -> str:
    """The response inside `query`: the tokens of prompt and response, decoded together, special tokens too.

    They are the prompt's own characters up to Unicode's normal forms: Qwen's tokenizers compose (NFC), so that an ohm sign comes
    back as an omega. A prompt that OpenRLHF cut from the left (longer than its room) is found by its longest end. ValueError where
    neither is there.
    """
    if query.startswith(prompt):
        return query[len(prompt) :]
    # Decomposed (NFD), because composing joins characters of which a cut may have left one.
    whole = normalize("NFD", prompt)
    end = _end_of(whole, query, 0)
    if end is None:
        start = next((i for i, c in enumerate(query) if c != "\ufffd" and not combining(c)), 0)  # past what is left of a cut character
        end = _end_of(_shared(whole, normalize("NFD", query[start:])), query, start)
    if end is None:
        raise ValueError(
            f"the prompt is not at the beginning of the decoded text, nor are {LEAST_PROMPT} characters or more of its end: the prompt ends "
            f"{prompt[-80:]!r}, the text begins {query[:80]!r}; use a tokenizer that decodes prompts as they were, and room for them "
            "(--data.max_len less --rollout.max_new_tokens)"
        )
    return query[end:]


def _end_of(decomposed: str | None, text: str, start: int) -> int | None:
    """Index in `text` at which what begins at `start` and decomposes to `decomposed` ends; None where nothing does."""
    if decomposed is None:
        return None
    lengths = accumulate((len(normalize("NFD", text[i])) for i in range(start, len(text))), initial=0)
    end = next((i for i, length in enumerate(lengths, start) if length >= len(decomposed)), None)
    return end if end is not None and normalize("NFD", text[start:end]) == decomposed else None


def _shared(prompt: str, text: str) -> str | None:
    """The longest end of `prompt` that `text` begins with, both decomposed; None for one that is too short to tell.

    Knuth, Morris and Pratt's search, in linear time on a prompt of repeats, too. The combining characters that end the prompt are
    left to :func:`_end_of`: those of the response follow, and decomposing orders them all.
    """
    last = next((i for i in range(len(prompt), 0, -1) if not combining(prompt[i - 1])), 0)
    text = text[:last]
    borders, matched = [0] * len(text), 0  # of each beginning of the text: its longest border
    for i in range(1, len(text)):
        while matched and text[i] != text[matched]:
            matched = borders[matched - 1]
        matched += text[i] == text[matched]
        borders[i] = matched
    matched = 0
    for character in prompt[:last]:
        while matched and (matched == len(text) or character != text[matched]):
            matched = borders[matched - 1]
        matched += matched < len(text) and character == text[matched]
    return prompt[last - matched :] if matched >= LEAST_PROMPT else None


def strip_end(response: str) -> tuple[str, bool]:
    """(the response without white space and end-of-sequence tokens at its end, whether it had such a token).

    A loop over the end of the text: one expression for all of it takes quadratic time on a response of blank lines.
    """
    text, ended = response.rstrip(), False
    while match := END_TOKEN.search(text, max(0, len(text) - 64)):
        text, ended = text[: match.start()].rstrip(), True
    return text, ended


def with_opened_thinking(prompt: str, response: str) -> str:
    """The response with the <think> that a chat template has put at the end of its prompt."""
    return f"<think>{response}" if prompt.rstrip().endswith("<think>") else response


def find_answer(response: str, *, boxed_only: bool = False) -> str | None:
    """The answer's text without dollar signs, or None where there is none (or one of more than MAX_ANSWER_CHARS)."""
    text, _ = strip_end(response)
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    elif "<think>" in text:
        return None
    answer = boxed(text)
    if answer is None and not boxed_only and not BOX.search(text):
        tail = text[-TAIL_CHARS:]
        inside = tagged(tail)
        answer = plain(tail if inside is None else inside)
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer.strip()


def tagged(text: str) -> str | None:
    """What the last <answer>...</answer> holds; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    """Contents of the last box, or of the last run of boxes, joined by commas; None without a closed box."""
    boxes = []  # (start, end, content)
    position = 0
    while match := BOX.search(text, position):
        end = closing_brace(text, match.end())
        if end is None:  # cut off in the box: an earlier one would be no final answer
            return None
        boxes.append((match.start(), end + 1, text[match.end() : end]))
        position = end + 1
    if not boxes:
        return None
    run = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not BETWEEN_BOXES.fullmatch(text[box[1] : run[0][0]]):
            break
        run.insert(0, box)
    contents = [content.strip() for _, _, content in run]
    return contents[-1] if len(set(contents)) == 1 else ", ".join(contents)


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`."""
    depth = 1
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return i
    return None


def plain(text: str) -> str | None:
    """The announced answer, else the last line's last formula, else the last line."""
    text = text.strip()
    announcements = [match for match in ANNOUNCED.finditer(text)]
    if announcements:
        rest = text[announcements[-1].end() :].strip(" *:\n")
        line = rest.split("\n", 1)[0]
    else:
        line = text.rsplit("\n", 1)[-1]
    if line.lstrip().startswith(("$$", "\\[")) or line.strip() in ("$$", "\\["):
        line = rest if announcements else text
    formulas = [next(g for g in match.groups() if g is not None) for match in FORMULA.finditer(line)]
    return formulas[-1].strip() if formulas else line.strip(" *`") or None
