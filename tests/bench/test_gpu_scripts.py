"""The scripts of benchmarks/gpu without a GPU: what they would run parses, so that no machine is lent for a typing error."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from qarl_openrlhf.ablation.plan import split_flags
from qarl_openrlhf.cli import ablate_objectives, bench_kernels, bench_step, bench_sync
from qarl_openrlhf.cli.flags import add_flags
from qarl_openrlhf.cli.host import HostCommandLine

ROOT = Path(__file__).parents[2]


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
    given = {"QARL_DRY_RUN": "1", "QARL_PYTHON": "python", "PATH": os.environ["PATH"]} | environment
    command = ["bash", str(ROOT / "benchmarks" / "gpu" / f"{name}.sh"), *words]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)


def commands(name: str, *words: str, **environment: str) -> list[tuple[int, str, list[str]]]:
    """(seconds, module, words after it) of each piece."""
    done = script(name, *words, **environment)
    assert done.returncode == 0, done.stderr
    pieces = []
    for line in done.stdout.splitlines():
        seconds, *rest = shlex.split(line.partition(": timeout ")[2])
        at = rest.index("-m")
        pieces.append((int(seconds), rest[at + 1], rest[at + 2 :]))
    return pieces


def test_every_step_command_parses_and_ends_in_time():
    found = commands("step", "1.5b", "7b", "8b", "30b-a3b", QARL_STEP_FLAGS="--lengths mixed --schemes bf16 w4a16")
    assert len(found) == 8
    for seconds, module, words in found:
        assert module == "qarl_openrlhf.cli.bench_step"
        args, extra = bench_step._parser().parse_known_args(words)
        assert extra == ["--actor.logprob_chunk", "2048"] and args.lengths == ["mixed"] and args.schemes == ["bf16", "w4a16"]
        assert 60 * args.minutes < seconds < 600


def test_every_push_command_parses_and_is_refused_by_nothing_but_the_missing_gpu(capsys):
    found = commands("transports")
    assert [words[words.index("--transport") + 1] for _, _, words in found] == ["nccl"] * 5 + ["ipc"] * 2
    for seconds, module, words in found:
        assert module == "qarl_openrlhf.cli.bench_sync" and seconds < 600
        assert bench_sync._parser().parse_args(words).pushes == 20 and "--decode" in words
        with pytest.raises(SystemExit):
            bench_sync.main(words)
        assert "no CUDA device" in capsys.readouterr().err
    assert sum("--openrlhf" in words for _, _, words in found) == 2


def test_every_kernel_family_exists():
    assert [words[0] for _, _, words in commands("kernels")] == list(bench_kernels.FAMILIES)


def test_every_run_of_the_learning_groups_has_flags_that_exist():
    (_, policy, words), *runs = commands("learning", QARL_LEARNING_FLAGS="--actor.optim adam")
    from qarl_openrlhf.data import small_qwen3

    given = small_qwen3.make_parser().parse_args(words)
    assert policy == "qarl_openrlhf.data.small_qwen3" and given.hidden % 256 == given.intermediate % 256 == 0
    assert len(runs) == 14 + 6 + 3
    host = HostCommandLine()
    add_flags(host.parser)
    known = {flag for action in host.parser._actions for flag in action.option_strings}
    for _, module, words in runs:
        args, shared = ablate_objectives._parser().parse_known_args(words)
        assert module == "qarl_openrlhf.cli.ablate_objectives" and args.arms and args.seeds
        assert {f"--{name}" for name, _ in split_flags(shared)} <= known
        host.parser.parse_args(shared)


def test_schemes_and_the_seed_of_the_smaller_groups_are_named():
    found = commands("learning", "schemes", QARL_LEARNING_SCHEMES="fp8,w4a16:g32:rollout", QARL_LEARNING_SEEDS="1,2")[1:]
    args = [ablate_objectives._parser().parse_known_args(words)[0] for _, _, words in found]
    assert [(a.schemes, a.seeds, a.arms) for a in args] == [(["fp8"], [1], ["tbpo"]), (["w4a16:g32:rollout"], [1], ["tbpo"])]


@pytest.mark.parametrize("own", ["0", "1"])
def test_arms_start_from_the_policy_of_their_form(tmp_path, own):
    """A program that writes down its arguments in place of Python: whole, with its jobs on two GPUs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "gpu=$CUDA_VISIBLE_DEVICES $*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    done = script(
        "learning", "main", "schemes", QARL_DRY_RUN="", QARL_PYTHON=str(python), QARL_LEARNING_OWN=own, QARL_LEARNING_JOBS="2",
        QARL_LEARNING_DIR=str(tmp_path / "runs"), QARL_LEARNING_SECONDS="120", CUDA_VISIBLE_DEVICES="4,7",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [line.split(" ") for line in (tmp_path / "calls").read_text().splitlines()]
    taught = [words for words in calls if "qarl_openrlhf.data.small_qwen3" in words]
    four_bit = "sums-16-4bit" if own == "1" else "sums-16"
    assert sorted(words[3].rpartition("/")[2] for words in taught) == (["sums-16", four_bit] if own == "1" else ["sums-16"])
    assert {words[0] for words in taught} == ({"gpu=4", "gpu=7"} if own == "1" else {"gpu=4"})
    assert [words[words.index("--scheme") + 1] for words in taught if "--scheme" in words] == (["w4a16"] if own == "1" else [])
    runs = [words for words in calls if "qarl_openrlhf.cli.ablate_objectives" in words]
    assert len(runs) == 17 and {words[0] for words in runs} == {"gpu=4", "gpu=7"}
    for words in runs:
        scheme = words[words.index("--schemes") + 1]
        policy = four_bit if scheme.startswith("w4") else "sums-16"
        for flag, file in ("actor.model_name_or_path", "model"), ("data.prompt_dataset", "prompts.jsonl"), ("eval.dataset", "heldout.jsonl"):
            assert words[words.index(f"--{flag}") + 1].endswith(f"/{policy}/{file}"), scheme


@pytest.mark.parametrize(
    "name, words, environment, message",
    [
        ("step", ["9b"], {}, "there is no piece 9b: there are 1.5b 7b 8b 30b-a3b"),
        ("transports", ["nvlink"], {}, "there is no piece nvlink"),
        ("learning", [], {"QARL_LEARNING_JOBS": "two"}, "QARL_LEARNING_JOBS=two: use a whole number"),
        ("learning", [], {"QARL_LEARNING_SCHEMES": "fp8 w8a8"}, "use schemes with commas between them"),
        ("step", [], {"QARL_STEP_PARTS": "engines"}, "there is no piece engines"),
    ],
)
def test_a_wrong_word_ends_the_script_before_it_starts(name, words, environment, message):
    done = script(name, *words, **environment)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_a_piece_that_fails_or_runs_over_does_not_keep_the_next_from_running(tmp_path):
    common = ROOT / "benchmarks" / "gpu" / "common.sh"
    body = f"source {common}\npiece bad 5 false\npiece late 1 sleep 30\npiece good 5 echo ran\nfinish\n"
    path = tmp_path / "three.sh"
    path.write_text(body)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "ran\n== good: done" in done.stdout and "late: ended with status 124" in done.stdout
    assert "not done: bad late" in done.stderr


def test_every_recipe_run_resolves(tmp_path):
    """Each line of recipes.sh is a recipe that prints its command; colocated and apart differ by who has which GPUs."""
    done = script("recipes", QARL_RECIPES_GPUS="4", QARL_RECIPES_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": timeout ")[::2] for line in done.stdout.splitlines()]
    assert [name for name, _ in lines if "resumed" in name] == [
        f"{recipe} {place} qarl, resumed" for recipe in ("qwen3_8b", "qwen3_30b_a3b") for place in ("colocated", "apart")
    ]
    assert len(lines) == 2 * (1 + 2 * 4) + 1
    for name, command in lines[1:-1]:
        if "random weights" in name:
            continue
        words = shlex.split(command)[1:]
        printed = subprocess.run(["env", "QARL_PRINT_COMMAND=1", *words[1:]], capture_output=True, text=True, cwd=ROOT, check=True).stdout
        args = shlex.split(printed)
        engines, tp = (int(args[args.index(flag) + 1]) for flag in ("--vllm.num_engines", "--vllm.tensor_parallel_size"))
        learners = int(args[args.index("--actor.num_gpus_per_node") + 1])
        apart = "apart" in name
        assert (learners, engines * tp) == ((2, 2) if apart else (4, 4)) and ("--train.colocate_all" in args) is not apart


@pytest.mark.parametrize("gpus, apart", [("2", ["qwen3_8b"]), ("6", ["qwen3_8b"]), ("3", [])])
def test_recipes_are_not_tried_apart_on_gpus_that_do_not_divide(tmp_path, gpus, apart):
    done = script("recipes", QARL_RECIPES_GPUS=gpus, QARL_RECIPES_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [name for name in ("qwen3_8b", "qwen3_30b_a3b") if f"{name} apart qarl" in done.stdout] == apart
    assert "qwen3_30b_a3b apart: left out, it takes a multiple of 4 GPUs" in done.stderr


def test_a_run_that_left_no_checkpoint_is_not_called_resumed(tmp_path):
    """`false` in place of Python: nothing is trained, nothing saved."""
    done = script(
        "recipes", "qwen3_8b", QARL_DRY_RUN="", QARL_PYTHON="/bin/false", QARL_RECIPES_GPUS="2", QARL_RECIPES_ARMS="qarl",
        QARL_RECIPES_PLACES="colocated", QARL_RECIPES_DIR=str(tmp_path), QARL_VENV=str(tmp_path / "none"),
    )  # fmt: skip
    assert done.returncode == 1 and "== qwen3_8b colocated qarl (at most" in done.stdout and "resumed" not in done.stdout
    assert "qwen3_8b colocated qarl, resumed" in done.stderr


def test_random_weights_are_a_model_that_the_stack_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "benchmarks/random_model.py", "tiny-moe", str(tmp_path / "model"), "--layers", "1", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in ("random_model: wrote", "random_model: already there"):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
        assert words in done.stdout
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    config = model.config
    assert len(tokenizer) == config.vocab_size == 4096 and config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(range(config.vocab_size)).count("<|more_") == 4096 - 320  # every id has a text
    row = json.loads((tmp_path / "model" / "prompts.jsonl").read_text().splitlines()[3])
    text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text and row["prompt"] in text


def test_the_table_of_recipe_runs_puts_memory_beside_the_estimate(tmp_path):
    """Of a run as a GPU would leave it: flags of a resolved command line, one row of metrics, and one that never got to a row."""
    from qarl_openrlhf.checkpoint.flags import flatten
    from qarl_openrlhf.cli import train_qarl
    from qarl_openrlhf.planning.architecture import meta_model
    from qarl_openrlhf.planning.memory import learner_tensors
    from qarl_openrlhf.planning.model_shape import ModelShape
    from qarl_openrlhf.planning.parts import GIB
    from qarl_openrlhf.quant import QuantScheme
    from qarl_openrlhf.quant.convert import convert_model
    from tests.e2e.conftest import argv
    from tests.tiny_models import save_tiny_model

    model = save_tiny_model(tmp_path / "model", "qwen3")
    flags = {
        "device": "cpu", "actor.model_name_or_path": model, "data.prompt_dataset": "none.jsonl", "reward.remote_url": "none.py",
        "vllm.num_engines": 1, "actor.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1, "quant.scheme": "w4a16:g32",
    }  # fmt: skip
    args, _, _ = train_qarl.resolve(argv(flags))
    network = meta_model(AutoConfig.from_pretrained(model), model)
    wanted = learner_tensors(args, ModelShape.of(network, convert_model(network, QuantScheme.parse("w4a16:g32")), network.config))
    for name, row in (("qarl", {"step": 1, "memory/learner_peak_gib": 1.5 * wanted / GIB, "sync/checksum_ok": 1.0}), ("stuck", None)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"flags": dict(flatten(args))}, default=str))
        if row:
            (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "benchmarks/recipes_table.py", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    head, _, qarl, stuck = ([cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.strip().splitlines())
    assert dict(zip(head, qarl, strict=True))["peak / estimated"] == "1.50" and qarl[:3] == ["qarl", "1", "1"]
    assert stuck[:3] == ["stuck", "0", "-"] and len(stuck) == len(head)


def test_one_gpu_tries_the_recipe_for_one(tmp_path):
    done = script("recipes", QARL_RECIPES_GPUS="1", QARL_RECIPES_DIR=str(tmp_path), QARL_RECIPES_RESUME="0", QARL_RECIPES_LAYERS="36")
    assert done.returncode == 0, done.stderr
    names = [line.partition(": timeout ")[0] for line in done.stdout.splitlines()]
    assert names == ["qwen3_8b_1gpu: random weights", *(f"qwen3_8b_1gpu colocated {arm}" for arm in ("qarl", "bf16", "rollout")), "table"]
    assert "--layers 36" in done.stdout and "scripts/train_qwen3_8b_1gpu.sh" in done.stdout and "--ckpt.load_enable" not in done.stdout
