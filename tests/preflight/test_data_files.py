"""Prompt files and directories that a run cannot use are named, with the line, before Ray starts."""

import itertools
import os
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.prompts import check_prompts, check_template


def arguments(prompts, **data) -> N:
    given = {
        "prompt_dataset": str(prompts), "prompt_probs": None, "max_samples": 10**8, "input_key": "input", "label_key": "label",
        "input_template": None, "apply_chat_template": False, "prompt_split": "train",
    }  # fmt: skip
    return N(data=N(**(given | data)), eval=N(dataset=None, split="train"), rollout=N(batch_size=2))


GOOD = b'{"input": "1 + 1 =", "label": "2"}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has no rows"),
        (b"\n\n  \n", "has no rows"),
        (GOOD + b"this is no json\n", "line 2 is not JSON"),
        (GOOD + b'{"input": "caf\xe9", "label": "2"}\n', "line 2 is not UTF-8"),
        (GOOD + b'["a", "b"]\n', "line 2: a list; each row must be an object"),
        (b'["a", "b"]\n["c", "d"]\n', "each row must be an object|not JSON"),
        (GOOD + b'\n{"input": "a"}\n', r"line 3 has no key 'label' \(--data.label_key\); it has 'input'"),
        (b'{"prompt": "a", "label": "b"}\n', r"line 1 has no key 'input' \(--data.input_key\); it has 'prompt', 'label'"),
        (b'{"input": null, "label": "b"}\n', "'input' is None .*must be a string"),
        (b'{"input": 3, "label": "b"}\n', "must be a string"),
        (b'{"input": ["q"], "label": "b"}\n', "must be a string"),
        (b'{"input": "", "label": "b"}\n', "'input' is empty"),
        (b'{"input": "a", "label": null}\n', "'label' is null"),
        (GOOD + b'{"input": "a", "label": {"x": 1}}\n', "rows above have another type"),
        (GOOD, "1 prompts in --data.prompt_dataset do not make one rollout of --rollout.batch_size 2.*use --rollout.batch_size 1"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        check_prompts(arguments(path))
    assert "--data.prompt_dataset" in str(refused.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing.jsonl", "does not exist"), ("/no/such/set", "does not exist"), ("./set", "does not exist"), ("file.foo", "ending in .foo"),
        ("runs/inputs/math/train", "does not exist"), ("missing.txt", "does not exist"), ("a/b/c.json1", "does not exist"),
        ("notreally.parquet", "not a parquet file"),
    ],
)  # fmt: skip
def test_files_that_are_not_there_or_not_read(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    for made in ("file.foo", "notreally.parquet"):
        (tmp_path / made).write_bytes(GOOD * 3)
    with pytest.raises(ConfigError, match=message):
        check_prompts(arguments(name))


def test_what_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" + GOOD)
    (tmp_path / "b.json").write_bytes(b"[" + GOOD.strip() + b",\n" + GOOD.strip() + b"]")
    (tmp_path / "c.csv").write_text('input,label\n"a\nb",1\nc,2\n')
    (tmp_path / "d.jsonl").write_bytes(b'{"input": "a", "label": 3}\n{"input": "b", "label": 4.5}\n')
    (tmp_path / "e.jsonl").write_bytes(b'{"input": [{"role": "user", "content": "hi"}], "label": "3"}\n' * 2)
    parquet.write_table(pyarrow.table({"input": ["a", "b"], "label": ["1", "2"]}), tmp_path / "f.parquet")
    for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl", "f.parquet", "owner/name", "gsm8k@main", "a.jsonl,owner/name", ".", "https://host/p.jsonl"):
        check_prompts(arguments(name))
    check_prompts(arguments("e.jsonl", apply_chat_template=True))
    check_prompts(arguments("a.jsonl,b.json", prompt_probs="0.3,0.7"))
    with pytest.raises(ConfigError, match="no column 'question'"):
        check_prompts(arguments("f.parquet", input_key="question"))


@pytest.mark.parametrize("name, content", [("a.jsonl", GOOD * 2), ("a.json", b"[" + GOOD + b"," + GOOD + b"]"), ("a.csv", b"input,label\na,1\nb,2\n")])
def test_a_byte_order_mark_is_left_out_as_the_loader_leaves_it_out(tmp_path, name, content):
    from datasets import load_dataset

    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content)
    kind = "csv" if name.endswith("csv") else "json"
    loaded = load_dataset(kind, data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.column_names == ["input", "label"] and len(loaded) == 2
    check_prompts(arguments(path))


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
def test_a_directory_without_data_is_refused(tmp_path, flag):
    (tmp_path / "prompts.jsonl").write_bytes(GOOD * 5)
    empty = tmp_path / "empty"
    (empty / "deeper").mkdir(parents=True)
    (empty / ".hidden").touch()
    (empty / "README.md").touch()
    args = arguments(tmp_path / "prompts.jsonl")
    group, name = flag.split(".")
    setattr(getattr(args, group), name, str(empty))
    with pytest.raises(ConfigError, match=f"--{flag} {empty} is a directory without a data file"):
        check_prompts(args)
    (empty / "deeper" / "prompts.jsonl").write_bytes(GOOD)
    check_prompts(args)


@pytest.mark.parametrize("template", ["no placeholder", "{} {}", "{0}", "{name}", "{} {name}", "{{}}", "{", "{}{", "\\boxed{} {}", "{0.x}{}"])
def test_templates_that_would_lose_the_prompt(template):
    with pytest.raises(ConfigError, match="--data.input_template .* needs {} just once"):
        check_template(N(**{"data.input_template": template}))


def test_templates_that_hold_it():
    for template in (None, "", "{}", "Question: {}\nAnswer in \\boxed{{}}:"):
        check_template(N(**{"data.input_template": template}))


def test_samples_that_the_flags_let_through_are_counted_and_weights_must_match(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD * 5)
    with pytest.raises(ConfigError, match="1 prompts as --data.max_samples lets through"):
        check_prompts(arguments(path, max_samples=1))
    for wrong in ("0.5,0.5", "x"):
        with pytest.raises(ConfigError, match="--data.prompt_probs"):
            check_prompts(arguments(path, prompt_probs=wrong))


def test_a_local_file_has_no_other_split(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD * 5)
    with pytest.raises(ConfigError, match="--data.prompt_split test: a local file .* use train"):
        check_prompts(arguments(path, prompt_split="test"))


def test_evaluation_prompts_are_read_too(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD * 5)
    args = arguments(path)
    args.eval.dataset = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="--eval.dataset .* does not exist"):
        check_prompts(args)


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
def test_files_that_the_loader_cannot_put_together(tmp_path, flag):
    """Judged as the loader of data sets does: a key may be missing or null in one file, but not of two types."""
    from datasets import concatenate_datasets, load_dataset

    one = '"input": "1 + 1 =", "label": "2"'
    rows = {
        "none": "{%s}" % one, "null": '{%s, "datasource": null}' % one, "text": '{%s, "datasource": "a"}' % one,
        "whole": '{%s, "datasource": 1}' % one, "truth": '{%s, "datasource": true}' % one,
    }  # fmt: skip
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 3)
    loaded = {
        name: load_dataset("json", data_files=str(tmp_path / f"{name}.jsonl"), cache_dir=str(tmp_path / "cache"))["train"] for name in rows
    }
    for name, other in itertools.product(rows, rows):
        args = arguments(tmp_path / "none.jsonl")
        group, _, last = flag.partition(".")
        setattr(getattr(args, group), last, f"{tmp_path / name}.jsonl,{tmp_path / other}.jsonl")
        try:
            concatenate_datasets([loaded[name], loaded[other]])
        except ValueError:
            with pytest.raises(ConfigError, match=f"--{flag}: 'datasource' is .* in .*{name}.jsonl and .* in .*{other}.jsonl"):
                check_prompts(args)
        else:
            check_prompts(args)


def test_the_files_of_a_directory_are_checked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2)
    (tmp_path / "b.jsonl").write_bytes(GOOD + b'{"question": "a", "label": "b"}\n')
    (tmp_path / "README.md").write_text("two files")
    with pytest.raises(ConfigError, match=r"--data.prompt_dataset .*, b.jsonl, line 2 has no key 'input'"):
        check_prompts(arguments(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    check_prompts(arguments(tmp_path))
