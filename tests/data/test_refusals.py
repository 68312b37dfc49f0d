"""The data commands on what cannot be read, made or written: one line that names it, and no file."""

import json

import pytest

from qarl_openrlhf.cli import prepare_data
from qarl_openrlhf.data import reasoning_gym, smollm2

ROW = b'{"problem": "What is 1+1?", "answer": "2"}\n'


def refused(capsys, main, *argv) -> str:
    """The last line of what is said: argparse puts its usage first."""
    with pytest.raises(SystemExit) as error:
        main(list(map(str, argv)))
    message = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert "\n" not in message
    return message


FILES = {
    "latin1.jsonl": (ROW + '{"problem": "café"}\n'.encode("latin-1"), "line 2 is no UTF-8"),
    "latin1.json": ('[{"problem": "café"}]'.encode("latin-1"), "is no UTF-8"),
    "list.jsonl": (ROW + b'["a", "b"]\n', "line 2 is no JSON object with columns, but a list"),
    "number.jsonl": (b"3\n", "line 1 is no JSON object with columns, but a int"),
    "null.json": (b"[null]", "row 1 is no JSON object with columns, but a NoneType"),
    "cut.jsonl": (ROW + b'{"problem": "a', "line 2 is no JSON"),
    "cut.json": (b'[{"problem": ', "cut.json is no JSON"),
    "object.json": (ROW, "holds no list of rows"),
    "rows.parquet": (ROW, "is no parquet file"),
    "empty.parquet": (b"", "is no parquet file"),
    "messages.jsonl": (b'{"prompt": ["a", 3, {"role": "user"}], "answer": 1}\n', "row 1 has no problem"),
    "empty.jsonl": (b"", "empty.jsonl has no rows"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flag", ["--train", "--eval"])
def test_files_of_problems(tmp_path, capsys, flag, name):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    other = ["--eval"] if flag == "--train" else ["--train", "none"]
    assert message in refused(capsys, prepare_data.main, "--out", tmp_path / "out", *other, flag, tmp_path / name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../e", "a/b", "/etc/x", "."])
def test_names_of_evaluation_sets_are_file_names(tmp_path, capsys, name):
    (tmp_path / "a.jsonl").write_bytes(ROW)
    out = ["--out", tmp_path / "deep" / "out", "--train", "none"]
    said = refused(capsys, prepare_data.main, *out, "--eval", f"{name}={tmp_path / 'a.jsonl'}")
    assert "leave slashes out of it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("text", ["no", "{problem} {problem}", "{problem!x}", "{problem!r}", "{problem[0]}", "{problem.foo}", "{problem:>9}", "{other}", "{}", "{", "\\boxed{} {problem}"])
def test_templates(tmp_path, capsys, text):
    assert "doubled: \\boxed{{}}" in refused(capsys, prepare_data.main, "--out", tmp_path / "out", "--template", text)


@pytest.mark.parametrize("text", ["{problem}", "a {{b}} {problem}\\n\\boxed{{}}"])
def test_templates_that_work(text):
    assert prepare_data.template_of(text).format(problem="P") == text.replace("{problem}", "P").replace("{{", "{").replace("}}", "}").replace("\\n", "\n")


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x/y"])
def test_where_nothing_can_be_written(tmp_path, capsys, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "a.jsonl").write_bytes(ROW)
    (tmp_path / "empty.gguf").write_bytes(b"")
    target = tmp_path / place
    messages = [
        refused(capsys, prepare_data.main, "--out", target, "--eval", "--train", tmp_path / "a.jsonl"),
        refused(capsys, reasoning_gym.main, "--task", "chain_sum", "--n", "1", "--out", target / "a.jsonl"),
        refused(capsys, smollm2.main, target, "--gguf", tmp_path / "empty.gguf"),
    ]
    for message in messages:
        assert ("is not a directory" if "file" in place else "nothing can be written to /proc") in message


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shots", "-3"], "shots must be 0 or more, not -3"),
        (["--config", "min_terms=2.5", "max_terms=3.5"], "makes no problems of the configuration {'min_terms': 2.5"),
        (["--config", "min_terms=2.5", "max_terms=3.5", "--shots", "2"], "makes no problems of the configuration"),
        (["--config", "min_terms=null"], "refuses the configuration"),
        (["--config", "seed=3"], "--config seed: give --seed in its place"),
        (["--config", "size=3"], "--config size: give --n in its place"),
        (["--out", ""], "--out '': name a file"),
        (["--out", "DIR"], "name a file, e.g. "),
    ],
)
def test_reasoning_gym(tmp_path, capsys, words, message):
    words = [word.replace("DIR", str(tmp_path)) for word in words]
    out = ["--out", tmp_path / "a.jsonl"]
    assert message in refused(capsys, reasoning_gym.main, *out, "--task", "chain_sum", "--n", "2", *words)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_of_no_gguf(tmp_path, capsys):
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_bytes(ROW)
    (tmp_path / "magic.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 64)
    for name in ("empty", "text", "magic"):
        assert f"{name}.gguf is no whole GGUF file" in refused(capsys, smollm2.main, tmp_path / "out", "--gguf", tmp_path / f"{name}.gguf")
    for path in (tmp_path / "none.gguf", tmp_path):
        assert f"--gguf {path} cannot be read" in refused(capsys, smollm2.main, tmp_path / "out", "--gguf", path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stamp", ["{bad", "[]", "null", ""])
def test_smollm2_beside_a_broken_stamp(tmp_path, capsys, stamp):
    (tmp_path / "text.gguf").write_bytes(ROW)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / smollm2.STAMP).write_text(stamp)
    assert "does not hold this conversion of text.gguf" in refused(capsys, smollm2.main, tmp_path / "out", "--gguf", tmp_path / "text.gguf")


def test_a_finished_conversion_needs_no_writing(tmp_path, monkeypatch):
    (tmp_path / "text.gguf").write_bytes(ROW)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / smollm2.STAMP).write_text(json.dumps(smollm2.stamp_of(tmp_path / "text.gguf")))
    monkeypatch.setattr(smollm2, "why_unwritable", lambda path: "read-only")
    assert not smollm2.convert(tmp_path / "out", tmp_path / "text.gguf")
