"""Files of one object a line are read back whole: with any text in them, from any version of their end."""

import json

import pytest

from qarl_openrlhf.evaluation.records import Records
from qarl_openrlhf.lines import append_lines, read_lines, read_objects, write_jsonl
from qarl_openrlhf.metrics.progress import _Tail
from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.report.histograms import load_histograms
from qarl_openrlhf.report.runs import load_run
from qarl_openrlhf.report.tokens_html import load_records

# All that str.splitlines splits at.
BREAKS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e \r\n é 漢 𝄞"
ROW = {"step": 1, "text": BREAKS}


def test_every_line_break_may_be_in_a_string(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(ROW, ensure_ascii=False) + "\n" for _ in range(3)), encoding="utf-8")
    assert read_objects(path) == [ROW] * 3 and len(read_lines(path)) == 3


def test_a_failed_write_leaves_the_old_file(tmp_path):
    out = tmp_path / "rows.jsonl"
    write_jsonl(out, [ROW])
    with pytest.raises(TypeError):
        write_jsonl(out, [ROW, {"text": object()}])
    assert read_objects(out) == [ROW] and len(list(tmp_path.iterdir())) == 1


def test_cut_at_any_byte(tmp_path):
    """What is before the cut line is all there; the cut one is there only when nothing but its newline is missing."""
    path, whole = tmp_path / "a.jsonl", (json.dumps(ROW, ensure_ascii=False) + "\n").encode()
    for end in range(len(whole) + 1):
        path.write_bytes(whole + whole[:end])
        assert read_objects(path) == [ROW] * (2 if end >= len(whole) - 1 else 1), end


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"a": "caf\xe9', b"[1]", b"3", b"null", b"", b"{bad}"])
def test_a_broken_line_spoils_no_other(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert read_objects(path) == [{"a": 1}, {"a": 2}]


def test_the_readers_of_evaluations_and_runs(tmp_path):
    records = Records(tmp_path, "sums")
    records.append([{"index": i, "problem": BREAKS, "label": "1", "samples": [BREAKS]} for i in range(3)])
    response = dict.fromkeys("prompt ids tokens left_out advantage reward update old current sampler region push weight".split())
    write_records(str(tmp_path), 1, {"tokens": [response | {"why": "first", "prompt": BREAKS}], "histograms": {"ratio": {"at": [0], "n": [1]}}})
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps({"step": 1, "note": BREAKS}, ensure_ascii=False).encode() + b"\n")
    for name in ("sums.jsonl", "tokens.jsonl", "histograms.jsonl", "metrics.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write('{"step": 2, "index": 5, "text": "漢'.encode()[:-1])
    assert sorted(records.read()) == [0, 1, 2] and records.read()[2]["problem"] == BREAKS
    assert [row["prompt"] for row in load_records(tmp_path)[1]] == [BREAKS]
    assert load_histograms(tmp_path).steps == {1: {"ratio": {"at": [0], "n": [1]}}}
    assert load_run(tmp_path).steps == [1]


def test_a_line_after_an_unfinished_one_is_not_lost(tmp_path):
    path, whole = tmp_path / "a.jsonl", (json.dumps(ROW, ensure_ascii=False) + "\n").encode()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        append_lines(path, ['{"a": 1}', '{"a": 2}'])
        assert read_objects(path)[-2:] == [{"a": 1}, {"a": 2}] and path.read_bytes().startswith(whole[:end])
        assert b"\n\n" not in path.read_bytes() and not path.read_bytes().startswith(b"\n")


def test_the_progress_of_a_resumed_run_is_shown(tmp_path):
    """The killed run left half a line; the terminal goes on with the first step after it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rol')
    tail = _Tail(str(path))
    append_lines(path, ['{"step": 2}', '{"step": 3}'])
    assert tail.new_rows() == [{"step": 2}, {"step": 3}] and tail.new_rows() == []
