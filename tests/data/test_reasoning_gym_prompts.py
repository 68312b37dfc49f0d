"""Prompt sets: what OpenRLHF reads, reproducible, scorable."""

import json

import pytest

from qarl_openrlhf.data import reasoning_gym as data

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(n=40, **kwargs):
    arguments = {"config": SUMS, "style": "equation", "shots": 4, "exclude": " - "} | kwargs
    return data.prompt_rows("chain_sum", n, **arguments)


def test_equation_prompts_are_worked_examples_and_one_open_problem():
    for row in sums():
        *examples, problem = row["input"].split("\n")
        assert len(examples) == 4 and len(set(examples)) == 4
        for line in examples:
            left, right = line.split(" = ")
            a, b = left.split(" + ")
            assert int(a) + int(b) == int(right)
        a, b = problem.removesuffix(" =").split(" + ")
        assert problem.endswith(" =") and 0 <= int(a) <= 9 and 0 <= int(b) <= 9
        label = json.loads(row["label"])
        assert (label["task"], int(label["answer"])) == ("chain_sum", int(a) + int(b))
        assert row["datasource"] == "reasoning_gym/chain_sum"


def test_seed_changes_problems_but_not_examples():
    first, again, other = sums(seed=1), sums(seed=1), sums(seed=2)
    assert first == again
    assert [r["input"] for r in first] != [r["input"] for r in other]

    def examples(rows):
        return {r["input"].rsplit("\n", 1)[0] for r in rows}

    assert examples(first) == examples(other) and len(examples(first)) == 1
    assert examples(sums(shot_seed=1)) != examples(first)


def test_exclude_filters_and_an_empty_filter_is_an_error():
    assert any(" - " in row["input"].rsplit("\n", 1)[-1] for row in sums(exclude=None))
    with pytest.raises(data.DataError, match="leaves nothing"):
        sums(exclude="arithmetic problem")


def test_question_style_keeps_the_task_s_wording():
    (row,) = data.prompt_rows("chain_sum", 1, config=SUMS)
    assert row["input"].startswith("State the final answer to the following arithmetic problem:")


@pytest.mark.parametrize(
    "task, kwargs, message",
    [
        ("sums", {}, "no task 'sums'; it has .*chain_sum"),
        ("chain_sum", {"config": {"digits": 1}}, "refuses the configuration.*digits"),
        ("chain_sum", {"config": {"min_terms": 3, "max_terms": 2}}, "refuses the configuration.*max_terms"),
        ("chain_sum", {"style": "chat"}, "unknown style 'chat'"),
        ("spell_backward", {"style": "equation"}, "needs an expression, which task 'spell_backward' has not"),
        ("chain_sum", {"n": 0}, "at least 1"),
        ("chain_sum", {"config": SUMS, "shots": 300}, "only 1[0-9][0-9] different problems|only 200 different problems"),
    ],
)
def test_wrong_arguments_are_named(task, kwargs, message):
    with pytest.raises(data.DataError, match=message):
        data.prompt_rows(task, **({"n": 2} | kwargs))


def test_command_line_writes_what_openrlhf_reads(tmp_path):
    out = tmp_path / "deep" / "sums.jsonl"
    data.main(
        ["--task", "chain_sum", "--config", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1", "--exclude", " - "]
        + ["--style", "equation", "--shots", "4", "--n", "40", "--out", str(out)]
    )
    assert [json.loads(line) for line in out.read_text().splitlines()] == sums()
    assert [p.name for p in out.parent.iterdir()] == ["sums.jsonl"]
    from datasets import load_dataset  # OpenRLHF's way in

    from openrlhf.datasets.prompts_dataset import preprocess_data

    loaded = load_dataset("json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    prompt, label = preprocess_data(loaded[3], input_key="input", label_key="label")
    assert (prompt, label) == (sums()[3]["input"], sums()[3]["label"])
