"""Directories and patterns as sets of prompts: the files that the loader takes are the ones that are checked, to the line."""

import os

import pytest

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.prompts import check_prompts

from .test_data_files import GOOD, arguments, loaded


def test_the_files_of_a_directory_are_checked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2)
    (tmp_path / "b.jsonl").write_bytes(GOOD + b'{"question": "a", "label": "b"}\n')
    (tmp_path / "README.md").write_text("two files")
    with pytest.raises(ConfigError, match=r"--data.prompt_dataset .*, b.jsonl, line 2 has no key 'input'"):
        check_prompts(arguments(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    check_prompts(arguments(tmp_path))


BAD = GOOD + b"no json\n"
DIRECTORIES = {  # files of a directory, flags, what is said; None: the run would read it
    "other kind of file beside": ({"a.jsonl": BAD, "notes.txt": b"x"}, {}, "a.jsonl, line 2 is not JSON"),
    "folders": ({"data/a.jsonl": GOOD * 2, "data/more/b.jsonl": BAD}, {}, "data/more/b.jsonl, line 2 is not JSON"),
    "README": ({"a.jsonl": BAD, "README.md": b"# mine\n"}, {}, "a.jsonl, line 2 is not JSON"),
    "the fewer kind": ({"a.jsonl": GOOD, "b.jsonl": GOOD, "c.csv": b"x\n"}, {}, None),
    "another split": ({"train.jsonl": GOOD * 2, "test.jsonl": BAD}, {}, "test.jsonl, line 2 is not JSON"),
    "another split's columns": ({"train.jsonl": GOOD * 2, "test.jsonl": GOOD}, {}, None),
    "csv": ({"a.csv": b"input,label\nx,1\n", "b.csv": b"input,label\nx,1\ny,1,2,3\n"}, {}, "b.csv.*cannot be read|more cells"),
    "parquet": ({"a.parquet": b"PAR1 no"}, {}, "a.parquet is not a parquet file"),
    "split": ({"train.jsonl": GOOD * 2, "test.jsonl": GOOD}, {"prompt_split": "dev"}, "--data.prompt_split dev: .* has train, test instead"),
    "nothing it knows": ({"a.foo": GOOD}, {}, "the loader finds no set of prompts there"),
    "types that differ": (
        {"a.jsonl": b'{"input": "a", "label": 1}\n', "b.jsonl": b'{"input": "a", "label": "one"}\n'}, {}, "'label' is int in a.jsonl and str in b.jsonl",
    ),
    "types that are made the first's": ({"a.jsonl": GOOD, "b.jsonl": b'{"input": "a", "label": 1}\n'}, {}, None),
    "too few": ({"a.jsonl": GOOD}, {}, "1 prompts in --data.prompt_dataset do not make one rollout"),
    "folder after @": ({"one/a.jsonl": BAD, "two/a.jsonl": GOOD * 2}, {"at": "@two"}, None),
    "broken in the folder after @": ({"one/a.jsonl": BAD, "two/a.jsonl": GOOD * 2}, {"at": "@one"}, "one/a.jsonl, line 2 is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_files_that_the_loader_takes_are_the_ones_that_are_checked(tmp_path, name):
    from datasets import load_dataset

    files, flags, message = DIRECTORIES[name]
    flags = dict(flags)
    at = flags.pop("at", "")
    directory = tmp_path / "set"
    for file, content in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(content)
    try:
        rows = len(load_dataset(str(directory), data_dir=at[1:] or None, cache_dir=str(tmp_path / "cache"))[flags.get("prompt_split", "train")])
    except Exception:  # several, none of them its own
        rows = None
    if message is None:
        assert rows == 2
        check_prompts(arguments(f"{directory}{at}", **flags))
        return
    assert rows in ((1,) if name == "too few" else (None,))
    with pytest.raises(ConfigError, match=message):
        check_prompts(arguments(f"{directory}{at}", **flags))


PLACES = ("r[1]/p.jsonl", "r1/q.jsonl", "r[1]/q.jsonl", "a*b.jsonl", "q?.jsonl", "c{1}.jsonl", "f[1.jsonl", "d/x.jsonl", "d/__no/y.jsonl", "d/.z.jsonl")


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
def test_names_with_the_signs_of_a_pattern_are_what_the_loader_makes_of_them(tmp_path, monkeypatch, flag):
    for place in PLACES:
        (tmp_path / "in" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / place).write_bytes(GOOD * 2)
    monkeypatch.chdir(tmp_path / "in")
    patterns = ("r[1]/nope.jsonl", "r[[]1]/p.jsonl", "d/*.jsonl", "d/**/*.jsonl", "d/*/*.jsonl", "d/**.jsonl", "[ab]*.jsonl", "no*.jsonl")
    for name in PLACES + patterns:
        args = arguments("d/x.jsonl")
        group, last = flag.split(".")
        setattr(getattr(args, group), last, name)
        if name == "r[1]/q.jsonl":  # which of two files was meant, the loader does not ask
            assert loaded("json", name, tmp_path)
        if loaded("json", name, tmp_path) and name != "r[1]/q.jsonl":
            check_prompts(args)
            continue
        with pytest.raises(ConfigError) as refusal:
            check_prompts(args)
        said = str(refusal.value)
        assert said.startswith(f"--{flag} {name}: ") and "\n" not in said
        if os.path.isfile(name):  # what is advised works
            advised = said.rpartition("write ")[2]
            assert len(loaded("json", advised, tmp_path)) == 2
            setattr(getattr(args, group), last, advised)
            check_prompts(args)


def test_rows_of_all_files_of_a_pattern_are_checked_and_counted(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    check_prompts(arguments(tmp_path / "?.jsonl"))
    with pytest.raises(ConfigError, match="1 prompts in --data.prompt_dataset do not make one rollout"):
        check_prompts(arguments(tmp_path / "[a].jsonl"))
    (tmp_path / "b.jsonl").write_bytes(GOOD + b'{"input": 1, "label": "2"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--data.prompt_dataset .*/\?.jsonl, b.jsonl, line 2: 'input' is 1"):
        check_prompts(arguments(tmp_path / "?.jsonl"))
    with pytest.raises(ConfigError, match="a pattern must end in one of .json"):
        check_prompts(arguments("x/*.json*"))


def test_directories_with_the_signs_of_a_pattern(tmp_path, monkeypatch):
    from datasets import Dataset, load_dataset

    for name in ("k[2]", "k*", "m*"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.jsonl").write_bytes(GOOD * 2)
    for name, rows in (("k*", 4), ("m*", 2)):
        assert len(load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "cache"), split="train")) == rows
    check_prompts(arguments(tmp_path / "m*"))
    with pytest.raises(Exception, match="any data files"):
        load_dataset(str(tmp_path / "k[2]"), cache_dir=str(tmp_path / "cache"))
    for name in ("k*", "k[2]"):
        with pytest.raises(ConfigError, match="does not stand for this directory alone: rename it, or give its files, as in (.*)") as refusal:
            check_prompts(arguments(tmp_path / name))
        advised = str(refusal.value).rpartition("as in ")[2]
        check_prompts(arguments(advised))
        assert len(loaded("json", advised, tmp_path)) == 2
    monkeypatch.chdir(tmp_path / "k[2]")  # a relative name is one below it
    with pytest.raises(ConfigError, match="--data.prompt_dataset p.jsonl: the loader takes it for a pattern"):
        check_prompts(arguments("p.jsonl"))
    assert loaded("json", "p.jsonl", tmp_path) is None
    Dataset.from_list([{"input": "a", "label": "b"}] * 2).save_to_disk(str(tmp_path / "s[1]"))
    check_prompts(arguments(tmp_path / "s[1]"))
