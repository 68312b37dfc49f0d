"""The evaluation runner: scores, resuming, errors and tables; with vLLM on a made set in the slow set."""

import csv
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.cli import evaluate
from qarl_openrlhf.lines import write_jsonl
from qarl_openrlhf.data.reasoning_gym import DataError, prompt_rows
from qarl_openrlhf.data.sources import FORMATS
from qarl_openrlhf.data.worked_sums import response
from qarl_openrlhf.engine.offline import choose_engine
from qarl_openrlhf.evaluation import harness
from qarl_openrlhf.evaluation.grade import GymGrader, MathGrader
from qarl_openrlhf.evaluation.items import Settings, kind_of, load_items
from qarl_openrlhf.evaluation.records import Records, claim
from qarl_openrlhf.evaluation.sample import Runner
from qarl_openrlhf.evaluation.scores import pass_at, task_scores
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.rewards.pool import JudgePool
from tests.tiny_models import make_tokenizer, save_tiny_model

SETTINGS = Settings("m", "bf16", "vllm", 0.6, 1.0, 8, "{problem} =", False, 0)


@pytest.fixture(scope="module")
def grader():
    pool = JudgePool(seconds=30, size=1)
    yield MathGrader(pool)
    pool.close()


@pytest.fixture
def made(tmp_path):
    """Six sums as a set."""
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(6)))
    return str(path)


class Scripted:
    """Stands in for `vllm.LLM`: sample j of an item is right if j < its first number; the real runner does the rest."""

    def __init__(self):
        self.tokenizer, self.asked = make_tokenizer(), []

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, prompts, params, use_tqdm):
        outputs = []
        for prompt, p in zip(prompts, params, strict=True):
            text = self.tokenizer.decode(prompt["prompt_token_ids"])
            first = int(text.split("+")[0])
            self.asked.append((first, p.n, p.seed))
            texts = [f"\\boxed{{{first + 1 if j < first else 'none'}}}" for j in range(p.n)]
            samples = [SimpleNamespace(text=t, token_ids=[1] * 5, finish_reason="length" if "none" in t else "stop") for t in texts]
            outputs.append(SimpleNamespace(outputs=samples))
        return outputs


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for n, right, k in [(4, 1, 2), (5, 0, 3), (5, 5, 1), (6, 2, 3), (4, 3, 4)]:
        draws = list(combinations(range(n), k))
        assert pass_at(k, n, right) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


def test_scores():
    def record(*right):
        return {"samples": [{"right": r, "tokens": 10, "finish": "stop", "answer": "1", "verdict": "ok"} for r in right]}

    scores = task_scores([record(1, 1, 1), record(1, 0, 0), record(0, 0, 0)], k=3)
    assert scores["avg"] == pytest.approx(4 / 9)
    assert scores["pass"] == pytest.approx({"1": 4 / 9, "2": (1 + 2 / 3 + 0) / 3, "3": 2 / 3})
    assert scores["spread"] == pytest.approx(((2 / 9) ** 2 / 3 + 2 * (1 / 9) ** 2 / 3) ** 0.5)
    assert scores["stderr"] == pytest.approx((((5 / 9) ** 2 + (1 / 9) ** 2 + (4 / 9) ** 2) / 2 / 3) ** 0.5)


def test_a_stopped_run_goes_on_and_gives_the_same(tmp_path, made, grader):
    items, whole, stopped = load_items(f"sums={made}"), Scripted(), Scripted()
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    scores = Runner(whole, SETTINGS, tmp_path / "a", grader, at_once=8).run(items, 4)
    assert (scores["items"], scores["k"]) == (6, 4)
    assert scores["avg"] == pytest.approx((0 + 1 + 2 + 3 + 4 + 4) / 24)
    assert scores["pass"]["4"] == pytest.approx(5 / 6)
    assert scores["cut_off"] == pytest.approx(1 - scores["avg"]) and scores["tokens"] == 5
    Runner(stopped, SETTINGS, tmp_path / "b", grader).run(items[:3], 4)
    path = tmp_path / "b" / "sums.jsonl"
    path.write_text(path.read_text()[:-40])  # killed while the third line was written
    assert Runner(stopped, SETTINGS, tmp_path / "b", grader).run(items, 4) == scores
    assert [first for first, _, _ in stopped.asked] == [0, 1, 2, 2, 3, 4, 5]
    assert {ask[0]: ask for ask in stopped.asked}.items() == {ask[0]: ask for ask in whole.asked}.items()  # seeds, too
    assert len({seed for _, _, seed in whole.asked}) == 6
    assert Runner(None, SETTINGS, tmp_path / "b", grader).run(items, 2)["k"] == 2  # fewer samples: nothing to sample


class Taught(Scripted):
    """Answers as `data.small_qwen3` teaches it: right at the even items, wrong at the others."""

    def __init__(self, rows):
        super().__init__()
        labels = (json.loads(row["label"]) if "{" in row["label"] else {"answer": row["label"]} for row in rows)
        wrong = (label | {"answer": label["answer"] + "1"} if i % 2 else label for i, label in enumerate(labels))
        self.texts = {row["input"]: response(entry, "equation") for row, entry in zip(rows, wrong, strict=True)}

    def generate(self, prompts, params, use_tqdm):
        texts = [self.texts[self.tokenizer.decode(prompt["prompt_token_ids"])] for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=[1], finish_reason="stop")]) for text in texts]


@pytest.mark.parametrize("kind", ["gym", "mathematics"])
def test_the_answers_of_our_own_small_model_are_read(tmp_path, grader, kind):
    rows = prompt_rows("chain_sum", 6, config={"min_terms": 2, "max_terms": 2}, style="equation")
    if kind == "mathematics":
        rows = [row | {"label": json.loads(row["label"])["answer"]} for row in rows]
    write_jsonl(tmp_path / "heldout.jsonl", rows)
    items = load_items(f"sums={tmp_path / 'heldout.jsonl'}")
    assert kind_of(items) == kind
    settings = Settings(**SETTINGS.to_dict() | {"template": "{problem}"})
    scores = Runner(Taught(rows), settings, tmp_path, {"gym": GymGrader(), "mathematics": grader}[kind]).run(items, 1)
    assert (scores["avg"], scores["no_answer"]) == (0.5, 0)


def test_lines_that_are_no_records_count_as_not_there(tmp_path, made):
    items = load_items(f"sums={made}")
    good = {"index": 1, "problem": items[1].problem, "label": items[1].label, "samples": [{}]}
    broken = ["{}", "[]", "7", "{", *(json.dumps({k: v for k, v in (good | {"index": 0}).items() if k != gone}) for gone in good)]
    (tmp_path / "sums.jsonl").write_text("\n".join([*broken, json.dumps(good)]) + "\n")
    assert Records(tmp_path, "sums").done(items, 1) == {1: good}


def test_thinking_that_the_prompt_opened_is_no_answer(tmp_path, made, grader):
    settings = Settings(**SETTINGS.to_dict() | {"template": "{problem} = <think>"})
    scores = Runner(Scripted(), settings, tmp_path, grader).run(load_items(f"sums={made}"), 4)
    assert scores["avg"] == 0


def test_another_checkpoint_at_the_same_path_is_another_model(tmp_path):
    model = Path(save_tiny_model(tmp_path / "model", "llama"))
    before = evaluate.weight_files(str(model), None, None)
    assert before == evaluate.weight_files(str(model), None, None) and evaluate.weight_files("owner/name", None, None) == ""
    copy = shutil.copytree(model, tmp_path / "again" / "model", copy_function=shutil.copy)  # other times
    assert before == evaluate.weight_files(str(copy), None, None)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # trained on
    weights.write_bytes(content)
    assert before != evaluate.weight_files(str(model), None, None)
    for tag in ("global_step20", "global_step40"):
        (tmp_path / "ckpt" / "_actor" / tag).mkdir(parents=True)
        (tmp_path / "ckpt" / "_actor" / tag / "mp_rank_00_model_states.pt").write_bytes(tag.encode())
    found = set()
    for latest in ("global_step20", "global_step40"):  # a training goes on meanwhile
        (tmp_path / "ckpt" / "_actor" / "latest").write_text(latest)
        found.add(evaluate.weight_files(str(tmp_path / "ckpt"), "m", None))
    assert len(found) == 2
    assert evaluate.weight_files(str(tmp_path / "ckpt"), "m", "global_step20") != evaluate.weight_files(str(tmp_path / "ckpt"), "m", "global_step40")


@pytest.mark.parametrize("trained, scheme, noted", [
    ("w4a16:g64", None, "trained in w4a16:g64 and is evaluated in bf16; --scheme w4a16:g64 "), ("w4a16:g64", "w8a8", "evaluated in w8a8"),
    ("w4a16:g64", "w4a16:g64", None), ("w4a16:g64:rollout", "w8a8", None), ("bf16", "w8a8", None), (None, "w8a8", None),
])  # fmt: skip
def test_which_checkpoint_and_what_it_was_trained_in_is_said(tmp_path, trained, scheme, noted):
    step = tmp_path / "_actor" / "global_step3"
    step.mkdir(parents=True)
    if trained:
        manifest.write(step, {}, {"scheme": trained})
    first, *rest = evaluate.about_checkpoint(SimpleNamespace(source=str(tmp_path), tag=None, scheme=scheme), step)
    assert first == "from global_step3 (newest; --tag chooses another)"
    assert len(rest) == bool(noted) and (noted or "") in "".join(rest)


def test_other_settings_or_another_set_are_refused(tmp_path, made):
    claim(tmp_path / "r", SETTINGS)
    claim(tmp_path / "r", SETTINGS)
    with pytest.raises(DataError, match="temperature 0.6, now 1.0.*another directory"):
        claim(tmp_path / "r", Settings(**SETTINGS.to_dict() | {"temperature": 1.0}))
    Records(tmp_path, "sums").append([{"index": 0, "problem": "9 + 9", "label": "18", "samples": [{}]}])
    with pytest.raises(DataError, match="item 0 is another problem"):
        Records(tmp_path, "sums").done(load_items(f"sums={made}"), 1)


def test_arguments_are_checked_before_an_engine_starts(tmp_path, made):
    model = save_tiny_model(tmp_path / "model", "llama")
    cases = {
        "MODEL and --out are needed": [],
        "add --k 1": [model, "--out", "o", "--temperature", "0"],
        "--k 0: use a finite number at least 1": [model, "--out", "o", "--k", "0"],
        "--limit -1: use": [model, "--out", "o", "--limit", "-1"],
        "--workers 0: use": [model, "--out", "o", "--workers", "0"],
        "--temperature nan: use a finite number at least 0": [model, "--out", "o", "--temperature", "nan"],
        "--top_p 7: use a finite number above 0 and at most 1": [model, "--out", "o", "--top_p", "7"],
        "--max_tokens 0: use": [model, "--out", "o", "--max_tokens", "0"],
        "--tp 0: use": [model, "--out", "o", "--tp", "0"],
        "--gpu_memory_utilization 9: use": [model, "--out", "o", "--gpu_memory_utilization", "9"],
        "w5": [model, "--out", "o", "--scheme", "w5"],
        "--tasks aime99: neither a file nor one of aime24": [model, "--out", "o", "--tasks", "aime99"],
        "two sets have one name": [model, "--out", str(tmp_path / "o"), "--tasks", made, f"made={made}"],
        "--max_tokens 16384: MODEL has 512 positions for prompt and response together: use --max_tokens 384 or less": [model, "--out", str(tmp_path / "o"), "--tasks", made],
        "needs a GPU": [model, "--out", str(tmp_path / "p"), "--tasks", made, "--scheme", "fp8", "--max_tokens", "8"],
        "--table": ["--table", str(tmp_path)],
    }
    (tmp_path / "claimed").mkdir()
    (tmp_path / "claimed" / "settings.json").write_text(json.dumps(SETTINGS.to_dict()))
    cases["holds samples made otherwise (model 'm'"] = [model, "--out", str(tmp_path / "claimed"), "--tasks", made, "--max_tokens", "8"]
    if find_spec("lm_eval") is None:
        cases["not installed: pip install --no-deps -r requirements/eval.txt"] = [model, "--out", "o", "--tasks", "mmlu-pro"]
    for message, arguments in cases.items():
        with pytest.raises(SystemExit) as error:
            evaluate.main(arguments)
        assert message in str(error.value).replace(model, "MODEL"), arguments


def test_what_is_refused_leaves_nothing_behind(tmp_path, made):
    model = save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    short = ["--max_tokens", "8"]
    refused = ["--max_tokens", "16384"], [*short, "--scheme", "fp8"], [*short, "--scheme", "w4a16:g48"]
    failing_engine = [*short, "--tp", "3"]  # settings are claimed by then; vLLM refuses 3 for 4 heads
    for out in ("new", "new/below/it", "empty", "file/below"):
        for arguments in (*refused, failing_engine) if out == "new" else refused[:2]:
            with pytest.raises((SystemExit, ValueError)) as error:
                evaluate.main([model, "--out", str(tmp_path / out), "--tasks", made, *arguments])
            assert out != "file/below" or "file is not a directory" in str(error.value)
            assert sorted(tmp_path.rglob("*")) == before, (out, arguments)


@pytest.mark.parametrize("ending, content", [("jsonl", ""), ("jsonl", "\n\n"), ("json", "[]")])
def test_an_empty_set_is_named(tmp_path, ending, content):
    path = tmp_path / f"empty.{ending}"
    path.write_text(content)
    for argument in (str(path), f"own={path}", f"math500={path}", f"livecodebench={path}"):
        with pytest.raises(SystemExit, match=f"evaluate: error: --tasks {argument}: {path} is empty"):
            evaluate.main([".", "--out", str(tmp_path / "out"), "--tasks", argument])


OWN = [{"frage": "What is 1, and 1?", "antwort": "007", "input": "other"}, {"frage": 'Say "x"\nor y', "antwort": "1,5", "input": "other"}]


def written(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets do
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("ending", FORMATS)
def test_own_files_of_every_kind_and_with_columns_of_any_name(tmp_path, ending):
    path = written(tmp_path / f"own{ending}", OWN)
    items = load_items(f"mine={path}", None, "frage", "antwort")
    assert [(item.task, item.problem, item.label) for item in items] == [("mine", row["frage"], row["antwort"]) for row in OWN]
    known = written(tmp_path / f"known{ending}", [{"question": "1 + 1", "answer": "2", "note": ""}])
    assert [(item.problem, item.label) for item in load_items(known)] == [("1 + 1", "2")]
    assert [item.label for item in load_items(path, None, None, "antwort")] == ["007", "1,5"]  # the problem by its known name
    with pytest.raises(DataError, match=f"--label_key Antwort: {path}, row 1 has no such column; its columns are frage, antwort, input"):
        load_items(path, None, "frage", "Antwort")
    with pytest.raises(DataError, match=f"{path}, row 1 has no label"):
        load_items(path)
    hole = written(tmp_path / f"hole{ending}", [OWN[0], OWN[1] | {"antwort": ""}])
    with pytest.raises(DataError, match="hole.*, row 2 has no label: none of antwort is filled"):
        load_items(hole, None, "frage", "antwort")


def test_the_keys_reach_the_sets_and_only_own_ones(tmp_path):
    path = written(tmp_path / "own.csv", OWN)
    words = [".", "--out", str(tmp_path / "out"), "--tasks"]
    with pytest.raises(SystemExit, match="evaluate: error: --input_key x: .*own.csv, row 1 has no such column"):
        evaluate.main([*words, path, "--input_key", "x"])
    with pytest.raises(SystemExit, match="evaluate: error: --label_key is of own files, and aime24 has columns of its own"):
        evaluate.main([*words, path, "aime24", "--label_key", "antwort"])


BAD_CSV = {
    "more cells": (b"problem,answer\n1 + 1,2,3\n", "row 1 has more cells than the header has names: put text with commas between quotes"),
    "twice": (b"problem,answer,answer\n1,2,3\n", "has column 'answer' twice"),
    "quote": (b'problem,answer\n"1 + 1,2\n', "is no CSV file: "),
    "latin-1": (b"problem,answer\n\xfcber,2\n", "is no UTF-8"),
    "fewer cells": (b"problem,answer\n1 + 1\n", "row 1 has no label"),
    "empty": (b"", "is empty"),
    "header alone": (b"problem,answer\n", "is empty"),
}


@pytest.mark.parametrize("content, message", BAD_CSV.values(), ids=BAD_CSV)
def test_a_csv_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "own.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_items(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("row", [{"problem": "1 \ud800 1", "answer": "2"}, {"problem": "1 + 1", "answer": "2 \udfff"}])
def test_half_a_surrogate_pair_is_named(tmp_path, row):
    """JSON can write one; a pair is a character as any other."""
    for ending in ("jsonl", "json"):
        path, good = tmp_path / f"set.{ending}", {"problem": "1 + 1 \U0001f600", "answer": "2"}
        path.write_text(json.dumps(good) + "\n" + json.dumps(row) if ending == "jsonl" else json.dumps([good, row]))
        with pytest.raises(SystemExit, match=rf"evaluate: error: {path}, row 2: the (problem|label) has \\ud\w+ at character 3, half of") as error:
            evaluate.main([".", "--out", str(tmp_path / "out"), "--tasks", str(path)])
        assert str(error.value).isascii() and "\n" not in str(error.value)
        assert load_items(str(path), 1)[0].problem == good["problem"]


NO_JSON = [b"{", b"", b"\xff{}", b"[]", b"7", b"null"]
NO_SCORES = ["{}", '{"tasks": {}}', '{"tasks": []}', '{"tasks": {"a": 1}}', '{"tasks": {"a": {}}}', '{"tasks": {"a": {"avg": "x"}}}']
NO_SCORES += ['{"tasks": {"a": {"avg": NaN}}}', '{"tasks": {"a": {"headline": "pass", "k": 4, "pass": {}}}}']


@pytest.mark.parametrize("content", [*NO_JSON, *map(str.encode, NO_SCORES)])
def test_a_broken_summary_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(SystemExit, match=f"evaluate: error: {tmp_path}/summary.json (is broken|holds no scores).*: remove it") as error:
        evaluate.main(["--table", f"a={tmp_path}"])
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=f"{tmp_path}/summary.json "):
        evaluate.join_summary(tmp_path, {"sums": {"avg": 0.5}})


@pytest.mark.parametrize("content", NO_JSON)
def test_broken_settings_are_named(tmp_path, content):
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(DataError, match=f"{tmp_path}/settings.json is broken .*another directory"):
        claim(tmp_path, SETTINGS)


def test_lengths(tmp_path):
    model = save_tiny_model(tmp_path / "model", "llama")
    parse = evaluate.make_parser().parse_args
    assert evaluate.engine_choice(parse([model, "--max_tokens", "384"]), model)["max_model_len"] == 512
    assert evaluate.engine_choice(parse([model]), model, own=False)["max_model_len"] == 512  # lm-eval's lengths, not --max_tokens


def test_lm_eval_s_tasks_share_a_directory_with_any_sampling(tmp_path):
    claim(tmp_path, SETTINGS, harness.SETTINGS)
    claim(tmp_path, Settings(**SETTINGS.to_dict() | {"max_tokens": 9}))
    claim(tmp_path, SETTINGS, harness.SETTINGS)
    assert json.loads((tmp_path / "settings.json").read_text())["max_tokens"] == 9
    with pytest.raises(DataError, match="max_tokens 9, now 8"):
        claim(tmp_path, SETTINGS)
    with pytest.raises(DataError, match="scheme 'bf16', now 'w8a8'"):
        claim(tmp_path, Settings(**SETTINGS.to_dict() | {"scheme": "w8a8"}), harness.SETTINGS)


def test_table_of_runs(tmp_path, capsys):
    def summary(name, **scores):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"tasks": {task: {"avg": avg} for task, avg in scores.items()}}))
        return str(tmp_path / name)

    bf16, seed0, seed1 = summary("a", math500=0.8, aime24=0.3), summary("b", math500=0.7, aime24=0.2), summary("c", math500=0.72, aime24=0.22)
    part = summary("d", math500=0.5)
    evaluate.main(["--table", f"bf16={bf16}", f"qarl={seed0}", f"qarl={seed1}", part])
    assert capsys.readouterr().out.splitlines() == [
        "| run | aime24 | math500 | average |",
        "|---|---|---|---|",
        "| bf16 | 30.0 | 80.0 | 55.0 |",
        "| qarl | 21.0 ± 1.4 | 71.0 ± 1.4 | 46.0 ± 1.4 |",
        "| d | - | 50.0 | - |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bf16", "w4a16:g64"])
def test_with_vllm_on_a_made_set(tmp_path, made, scheme):
    """In a process of its own, twice: the second finds all samples done."""
    model = save_tiny_model(tmp_path / "model", "qwen3", hidden=128)  # heads of 32: vLLM's smallest in BF16 on a CPU
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qarl_openrlhf.cli.evaluate", model, "--tasks", f"sums={made}", "--out", str(out), "--k", "3"]
    command += ["--max_tokens", "16", "--template", "{problem} =", "--scheme", scheme, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "leaked" not in done.stderr and "Traceback" not in done.stderr and done.stdout.splitlines()[-1].startswith("| out | ")
    records = [json.loads(line) for line in (out / "sums.jsonl").read_text().splitlines()]
    assert [len(record["samples"]) for record in records] == [3] * 6
    assert len({sample["text"] for sample in records[0]["samples"]}) > 1  # really k different samples
    scores = json.loads((out / "summary.json").read_text())["tasks"]["sums"]
    assert (scores["items"], scores["k"]) == (6, 3) and 0 <= scores["avg"] <= 1 and 0 < scores["tokens"] <= 16
    assert json.loads((out / "settings.json").read_text())["engine"] == choose_engine("auto", QuantScheme.parse(scheme), "cpu")
    assert "| average |" in done.stdout and not list(out.glob(".weights-*"))
