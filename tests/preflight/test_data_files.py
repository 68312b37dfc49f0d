"""Prompt files that a run cannot use are named, with the line, before Ray starts."""

import itertools
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
        (GOOD + b"null\n" + GOOD, "line 2: null; each row must be an object"),
        (b"null\n" + GOOD, "line 1: null; each row must be an object"),
        (b"[" + GOOD + b", null]", "row 2: null; each row must be an object"),
        (b"[null]", "row 1: null; each row must be an object"),
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
        ("notreally.parquet", "not a parquet file that can be read"),
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
    parquet.write_table(pyarrow.table({"input": ["a", "b"], "label": ["1", "2"]}), tmp_path / "f.parquet")
    for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl", "f.parquet", "owner/name", "gsm8k@main", "a.jsonl,owner/name", ".", "https://host/p.jsonl"):
        check_prompts(arguments(name))
    (tmp_path / "e.jsonl").write_bytes(b'{"input": [{"role": "user", "content": "hi"}], "label": "3"}\n' * 2)
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
    (empty / "deeper" / "prompts.jsonl").write_bytes(GOOD * 2)
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


def loaded(kind: str, path, tmp_path) -> list[dict] | None:
    """Its rows as OpenRLHF gets them; None where the loader refuses the file."""
    from datasets import load_dataset

    try:
        return list(load_dataset(kind, data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train"))
    except Exception:  # several, none of them its own
        return None


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
@pytest.mark.parametrize(
    "content, message",
    [
        ("a,1\nnull,2\n", "row 2: 'input' is None .*the loader takes a CSV cell that is empty or reads NA.*use .jsonl"),
        ("NA,1\na,2\n", "row 1: 'input' is None"),
        ('"",1\na,2\n', "row 1: 'input' is None"),
        ("a,1\nb,\n", "row 2: 'label' is null.*use .jsonl"),
        ("a,1\nb\n", "row 2: 'label' is null"),
        ("1,1\n2,2\n", r"row 1: 'input' is 1 \(int\); a prompt must be a string .*a column of numbers for numbers"),
        ("a,1\nb,2,3\n", "cannot be read after row 0: .*Expected 2 fields in line 3, saw 3"),
        ("a,1,9\nb,2,3\n", "more cells than the header has names"),
        ('"a,1\nb,2\n', "cannot be read after row 0: .*inside string"),
        ("a,1\n" * 10_000 + "b,x\n", "cannot be read after row 10000: .*'x'"),
        ("a,x\n" * 10_000 + "NA,x\n", "row 10001: 'input' is None"),
        ("", "has no rows"),
    ],
)
def test_rows_of_csv_that_cannot_be_used(tmp_path, flag, content, message):
    """Every one of them ends a run: the loader refuses the file, or what it makes of it is no text, no label or no rows."""
    path = tmp_path / "prompts.csv"
    path.write_text("input,label\n" + content)
    rows = loaded("csv", path, tmp_path)
    assert not rows or any(type(row["input"]) is not str or row["label"] is None for row in rows) or "__index_level_0__" in rows[0]
    refused(tmp_path, flag, path, message)


def refused(tmp_path, flag: str, path, message: str, **data) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD * 5)
    args = arguments(tmp_path / "good.jsonl", **data)
    check_prompts(args)
    group, name = flag.split(".")
    setattr(getattr(args, group), name, str(path))
    with pytest.raises(ConfigError, match=f"--{flag} {path}.*{message}"):
        check_prompts(args)


def test_csv_that_is_read_as_the_loader_reads_it(tmp_path):
    for content in ("a,007\nb,4\n", "a,1\nb,4.5\n", "a,True\nb,False\n", '"a\nb",x\n"c, d",4\n', "a,1\n" * 10_000 + "b,2\n"):
        path = tmp_path / "prompts.csv"
        path.write_text("input,label\n" + content)
        check_prompts(arguments(path))
        assert loaded("csv", path, tmp_path)
    path.write_text("input,label\n" + "a,1\n" * 3)
    (tmp_path / "text.jsonl").write_bytes(GOOD)
    with pytest.raises(ConfigError, match="'label' is int in .* and str in "):
        check_prompts(arguments(f"{path},{tmp_path}/text.jsonl"))


TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
@pytest.mark.parametrize(
    "prompts, labels, message",
    [
        (["a", None], ["1", "2"], "row 2: 'input' is None"),
        ([1, 2], ["1", "2"], "row 1: 'input' is 1 "),
        (["a", ""], ["1", "2"], "row 2: 'input' is empty"),
        ([["a"], ["b"]], ["1", "2"], r"row 1: 'input' is \['a'\]"),
        ([TURN, TURN], ["1", "2"], "must be a string"),
        ([b"a", b"b"], ["1", "2"], r"row 1: 'input' is b'a' \(bytes\)"),
        (["a", "b"], ["1", None], "row 2: 'label' is null"),
        (["a", "b"], [1, None], "row 2: 'label' is null"),
        (["a", "b"], [None, None], "row 1: 'label' is null"),
        (["a"] * 200_000 + [None], ["1"] * 200_001, "row 200001: 'input' is None"),
        (["a", "b"], None, r"no column 'label' \(--data.label_key\)"),
    ],
)
def test_rows_of_parquet_that_cannot_be_used(tmp_path, flag, prompts, labels, message):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.table({"input": prompts} | ({} if labels is None else {"label": labels})), path)
    refused(tmp_path, flag, path, message)


def test_parquet_of_other_layouts(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "prompts.parquet"
    text = pyarrow.array(["a", "b"])
    for prompts in (text, text.dictionary_encode(), text.cast(pyarrow.large_string()), text.cast(pyarrow.string_view())):
        parquet.write_table(pyarrow.table({"label": [1, 2], "input": prompts}), path)
        assert [row["input"] for row in loaded("parquet", path, tmp_path)] == ["a", "b"]
        check_prompts(arguments(path))
    parquet.write_table(pyarrow.table({"input": [TURN, TURN], "label": ["1", "2"]}), path)
    check_prompts(arguments(path, apply_chat_template=True))
    parquet.write_table(pyarrow.table([text, text, text], names=["input", "label", "label"]), path)
    with pytest.raises(ConfigError, match="column 'label' twice"):
        check_prompts(arguments(path))
    parquet.write_table(pyarrow.table({"input": ["a"] * 50_000, "label": ["1"] * 50_000}), path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + b"\xff" * 1000 + whole[2000:])
    with pytest.raises(ConfigError, match="not a parquet file that can be read"):
        check_prompts(arguments(path))


SURROGATE = "has .ud800, half of a surrogate pair, which is no character: remove it"


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
@pytest.mark.parametrize(
    "content, message",
    [
        (GOOD + b'{"input": "\\ud800", "label": "2"}\n', f"line 2 {SURROGATE}"),
        (GOOD + b'{"input": "a", "label": "\\uD800"}\n', f"line 2 {SURROGATE}"),
        (b'{"input": "a", "label": "b", "other": [{"\\ud800": 1}]}\n', f"line 1 {SURROGATE}"),
        (b"[" + GOOD + b', {"input": "a", "label": "\\ud800"}]', f"row 2 {SURROGATE}"),
        (GOOD + b"[" * 100_000 + b"\n", "line 2 is nested too deeply"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (GOOD.replace(b'"2"', b"2") + b'{"input": "a", "label": NaN}\n', "line 2: 'label' is null"),
    ],
)
def test_json_that_only_python_reads(tmp_path, flag, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    refused(tmp_path, flag, path, message)


def test_whole_surrogate_pairs_are_characters(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"input": "\\ud83d\\ude00 \\\\ud800", "label": "2"}\n' * 2)
    assert loaded("json", path, tmp_path)
    check_prompts(arguments(path))


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
@pytest.mark.parametrize("names", ["{0},", ",{0}", "{0},,{0}", "{0}, ", "{0},@main", ","])
def test_empty_names_are_refused(tmp_path, flag, names):
    (tmp_path / "good.jsonl").write_bytes(GOOD * 5)
    args = arguments(tmp_path / "good.jsonl")
    group, name = flag.split(".")
    setattr(getattr(args, group), name, names.format(tmp_path / "good.jsonl"))
    with pytest.raises(ConfigError, match=f"--{flag} .* has an empty name"):
        check_prompts(args)
