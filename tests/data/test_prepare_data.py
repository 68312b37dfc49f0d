"""prepare_data on small made files with the real data sets' columns."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qarl_openrlhf.cli import prepare_data
from qarl_openrlhf.data.overlap import OverlapIndex

LONG = (
    "A farmer sells baskets of pears and plums at the market, where each basket of pears weighs three kilograms more than each "
    "basket of plums and ten baskets of both kinds weigh seventy kilograms."
)


def chat(problem: str) -> list[dict]:
    return [{"role": "system", "content": "Think first."}, {"role": "user", "content": problem}]


def openr1(problem: str, answer: str) -> dict:
    return {
        "data_source": "openr1",
        "prompt": chat(problem),
        "target": [{"role": "assistant", "content": "..."}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
    }


@pytest.fixture
def files(tmp_path):
    """--train and --eval arguments, each file in another format."""
    train = [
        openr1("What is $1+1$?", "2"),
        openr1("What is  $1 + 1$ ?", "2"),  # repeated
        openr1("Find $x$ if $x^2=4$ and $x>0$.", "2"),
        openr1("How many primes are below 10?", "4"),
        openr1("How many primes are below 10?", "5"),  # contradiction: both go
        openr1("Compute \\dfrac{1}{2} + 1.", "3/2"),  # MATH-500 has it
        openr1(LONG + " What does a basket of plums weigh?", "5.5"),  # AMC asks something else about the same text
        openr1("What is $1-1$?", "0"),  # the sign is a word, too
    ]
    pq.write_table(pa.Table.from_pylist(train), tmp_path / "train.parquet")
    sets = {
        "math500.jsonl": [{"problem": "Compute $\\frac{1}{2}+1$.", "solution": "...", "answer": "\\frac{3}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"}],
        "amc23.json": [{"id": 0, "question": LONG + " How many kilograms do the pears weigh?", "answer": 27.0, "url": ""}],
        "olympiadbench.jsonl": [{"question": "Solve $x^2=9$.", "final_answer": ["$3$", "$-3$"], "is_multiple_answer": True, "answer_type": "Numerical"}],
        "aime24.jsonl": [{"id": 60, "problem": "Find $m+n$.", "solution": "so \\boxed{033}."}],
        "aime25.jsonl": [{"problem": "Find $k$.", "answer": "70", "id": "0"}],
        "minerva.jsonl": [{"question": "What is the mass?", "answer": "4.5e33"}],
    }
    for name, rows in sets.items():
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)) + "\n"
        (tmp_path / name).write_text(text)
    return ["--train", str(tmp_path / "train.parquet"), "--eval", *(str(tmp_path / name) for name in sets)]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_real_columns_to_jsonl_without_overlap(tmp_path, files, capsys):
    out = tmp_path / "out"
    prepare_data.main(["--out", str(out), *files])
    train = read(out / "train.jsonl")
    assert [(row["problem"], row["label"]) for row in train] == [
        ("What is $1+1$?", "2"),
        ("Find $x$ if $x^2=4$ and $x>0$.", "2"),
        ("What is $1-1$?", "0"),
    ]
    assert train[0]["prompt"] == "What is $1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert set(train[0]) == {"prompt", "label", "source", "problem", "datasource"}
    labels = {path.stem: [row["label"] for row in read(path)] for path in (out / "eval").iterdir()}
    assert labels == {
        "math500": ["\\frac{3}{2}"], "amc23": ["27"], "olympiadbench": ["3, -3"], "aime24": ["033"], "aime25": ["70"], "minerva": ["4.5e33"]
    }  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(capsys.readouterr().out)
    assert summary["train"] == {
        "name": "train", "rows": 8, "kept": 3, "dropped": {"repeated": 1, "contradicting labels": 2, "in math500": 1, "in amc23": 1}
    }  # fmt: skip


def test_its_own_files_can_be_read_again(tmp_path, files):
    prepare_data.main(["--out", str(tmp_path / "a"), *files])
    again = ["--train", str(tmp_path / "a" / "train.jsonl"), "--eval", f"mine={tmp_path / 'a' / 'eval' / 'aime24.jsonl'}"]
    prepare_data.main(["--out", str(tmp_path / "b"), *again, "--template", "Q: {problem}\\nA:"])
    assert [r["problem"] for r in read(tmp_path / "b" / "train.jsonl")] == [r["problem"] for r in read(tmp_path / "a" / "train.jsonl")]
    assert read(tmp_path / "b" / "eval" / "mine.jsonl")[0]["prompt"] == "Q: Find $m+n$.\nA:"


def test_openrlhf_reads_the_columns(tmp_path, files):
    from openrlhf.datasets.prompts_dataset import preprocess_data

    prepare_data.main(["--out", str(tmp_path / "out"), *files])
    row = read(tmp_path / "out" / "train.jsonl")[0]
    assert preprocess_data(row, None, "prompt", "label", None) == (row["prompt"], "2")


@pytest.mark.parametrize(
    "rows, message",
    [
        ([{"text": "?", "answer": "1"}], "rows.jsonl, row 1 has no problem.*its columns are text, answer"),
        ([{"problem": "?", "answer": "1"}, {"problem": "?", "solution": "no box"}], "rows.jsonl, row 2 has no label"),
        ([{"problem": "1 + \ud800?", "answer": "1"}], r"rows.jsonl, row 1: the problem has \\ud800 at character 5"),
        ([{"problem": "?", "answer": "\udc00"}], r"rows.jsonl, row 1: the label has \\udc00 at character 1"),
        ([], "rows.jsonl has no rows"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, rows, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match=message):
        prepare_data.main(["--out", str(tmp_path / "out"), "--train", str(path), "--eval"])
    assert not (tmp_path / "out").exists()


def test_bad_arguments_name_the_flag(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "?"}\n{"problem"\n')
    cases = {
        "--train gsm9k: neither a file nor one of openr1-math-46k": ["--train", "gsm9k", "--eval"],
        "bad.jsonl, line 2 is no JSON": ["--train", str(bad), "--eval"],
        "ending '.xlsx' is not known": ["--train", "none", "--eval", f"a={tmp_path / 'a.xlsx'}"],
    }
    (tmp_path / "a.xlsx").write_text("")
    for message, arguments in cases.items():
        with pytest.raises(SystemExit) as error:
            prepare_data.main(["--out", str(tmp_path / "out"), *arguments])
        assert message in str(error.value)
    for template in ("no place", "{problem} {other}", "{problem} \\boxed{}"):
        with pytest.raises(SystemExit):
            prepare_data.main(["--out", str(tmp_path), "--template", template])
        assert "--template" in capsys.readouterr().err


def test_the_hub_s_absence_is_an_error_that_says_what_works(tmp_path, monkeypatch):
    import datasets

    from qarl_openrlhf.preflight import hub

    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(hub, "reachable", lambda url: True)  # as through a proxy that lets some of it through
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(SystemExit, match="--eval aime24: HuggingFaceH4/aime_2024 .*--eval aime24=FILE"):
        prepare_data.main(["--out", str(tmp_path / "out"), "--train", "none", "--eval", "aime24"])


def test_overlap_is_about_copies_not_about_topics():
    index = OverlapIndex([("amc23", LONG + " How heavy is one basket of pears?")])
    assert index.find("Yesterday I read this. " + LONG + " How heavy is one?") == "amc23"
    assert index.find("A farmer sells baskets of pears and plums at the market. How many does he sell?") is None
    assert index.find("") is None
