"""cli.export: checkpoints that DeepSpeed really wrote, every byte compared; with vLLM in the slow set."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl_openrlhf.checkpoint import manifest
from qarl_openrlhf.cli import export
from qarl_openrlhf.engine.offline import choose_engine, has_avx512, scheme_of
from qarl_openrlhf.export.directory import check_bytes, load_learner
from qarl_openrlhf.quant import QuantError, QuantScheme
from tests.tiny_models import save_tiny_model

TRAIN = Path(__file__).with_name("zero_checkpoint_worker.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"), "qwen2", tied=True)


def train(base: str, out: Path, world: int) -> Path:
    """{stage: --ckpt.path} of one-step trainings, and what each learner's parameters were: see the worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, str(TRAIN), base, str(out), port, str(rank), str(world)]) for rank in range(world)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    return out


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    return train(base, tmp_path_factory.mktemp("ckpt"), world=1)


@pytest.fixture(scope="module")
def checkpoints_of_two(base, tmp_path_factory):
    return train(base, tmp_path_factory.mktemp("ckpt2"), world=2)


def read(directory) -> dict:
    return {name: t for path in Path(directory).glob("*.safetensors") for name, t in load_file(path).items()}


def assert_is_the_learner(base: str, directory: Path, stage: int, out: Path) -> None:
    export.main([str(directory / f"zero{stage}"), "--model", base, "--out", str(out)])
    expected, written = torch.load(directory / f"zero{stage}.pt"), read(out)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert not torch.equal(written["model.norm.weight"], read(base)["model.norm.weight"])  # it was trained
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_checkpoint_is_the_learner_s_parameters(base, checkpoints, tmp_path, stage):
    assert_is_the_learner(base, checkpoints, stage, tmp_path / "bf16")


def test_end_tokens_of_the_model_stay(base, checkpoints, tmp_path):
    """An engine stops at generation_config's, besides the tokenizer's."""
    model = tmp_path / "model"
    shutil.copytree(base, model)
    # Not what save_pretrained takes: a temperature without sampling.
    given = {"eos_token_id": [5, 7], "do_sample": False, "temperature": 0.6}
    (model / "generation_config.json").write_text(json.dumps(given))
    export.main([str(checkpoints / "zero2"), "--model", str(model), "--out", str(tmp_path / "bf16")])
    export.main([str(tmp_path / "bf16"), "--out", str(tmp_path / "q"), "--scheme", "w4a16:g64"])
    for out in ("bf16", "q"):
        kept = json.loads((tmp_path / out / "generation_config.json").read_text())
        assert (kept["eos_token_id"], kept["temperature"]) == ([5, 7], 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_so_is_one_of_two_ranks(base, checkpoints_of_two, tmp_path, stage):
    assert_is_the_learner(base, checkpoints_of_two, stage, tmp_path / "bf16")
    if stage == 3:
        next((checkpoints_of_two / "zero3" / "_actor" / "global_step1").glob("*rank_1*optim_states.pt")).unlink()
        with pytest.raises(SystemExit, match="Every rank's files of one step are needed"):
            export.main([str(checkpoints_of_two / "zero3"), "--model", base, "--out", str(tmp_path / "again")])


def test_stages_export_the_same_codes_and_log_what_they_do(base, checkpoints, tmp_path, capsys):
    source = str(checkpoints / "zero3" / "_actor" / "global_step1")
    export.main([source, "--model", base, "--out", str(tmp_path / "q"), "--scheme", "w4a16:g64"])
    assert "14 of 15 linear layers in w4a16:g64" in capsys.readouterr().out
    export.main([str(checkpoints / "zero3"), "--model", base, "--out", str(tmp_path / "bf16")])
    export.main([str(tmp_path / "bf16"), "--out", str(tmp_path / "q2"), "--scheme", "w4a16:g64:rollout"])
    a, b = read(tmp_path / "q"), read(tmp_path / "q2")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "q", "q2"]  # no scratch left


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("wide"), "qwen2", hidden=256)


@pytest.mark.parametrize("name", ["bf16", "w4a16:g32", "w4a16:g64", "w4a16", "w8a8", "fp8", "w4a8"])
def test_the_scheme_of_an_export_is_read_back(wide, tmp_path, name):
    export.main([wide, "--out", str(tmp_path / "out"), "--scheme", name])
    assert scheme_of(str(tmp_path / "out")) == QuantScheme.parse(name)


@pytest.mark.parametrize("changes", [
    {"input_activations": {"type": "int"}},  # W4A8 in integers
    {"input_activations": {"strategy": "tensor", "dynamic": False}},
    {"input_activations": {"dynamic": False}},
    {"weights": {"symmetric": False}},
    {"weights": {"group_size": 32}},
    {"weights": {"strategy": "channel", "group_size": None}},
    {"weights": {"num_bits": 8}},
    {"weights": {"type": "float"}},
])  # fmt: skip
def test_a_checkpoint_of_another_format_is_not_named_as_one_of_ours(tmp_path, changes):
    config = QuantScheme.parse("w4a8").quantization_config(["lm_head"])
    path = Path(save_tiny_model(tmp_path / "model", "qwen2"), "config.json")
    written = json.loads(path.read_text())

    def read_back(config) -> QuantScheme:
        path.write_text(json.dumps(written | {"quantization_config": config}))
        return scheme_of(str(path.parent))

    assert read_back(config) == QuantScheme.parse("w4a8")
    two = config | {"config_groups": config["config_groups"] | {"group_1": config["config_groups"]["group_0"]}}
    for part, values in changes.items():
        config["config_groups"]["group_0"][part] |= values
    for other in (config, two):
        with pytest.raises(QuantError, match="is quantized in a way no scheme of ours has"):
            read_back(other)


def test_a_changed_byte_is_found(base, tmp_path):
    out = tmp_path / "out"
    export.main([base, "--out", str(out), "--scheme", "w8a8"])
    model, _ = load_learner(base, QuantScheme.parse("w8a8"))
    tensors = read(out)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] += 1
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(QuantError, match=f"{name} in"):
        check_bytes(model, out, QuantScheme.parse("w8a8"))
    del tensors[name]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(QuantError, match=f"lacks {name}"):
        check_bytes(model, out, QuantScheme.parse("w8a8"))


def test_errors_name_what_would_work(base, checkpoints, tmp_path):
    zero3, out = str(checkpoints / "zero3"), ["--out", str(tmp_path / "out")]
    (tmp_path / "empty").mkdir()
    other = save_tiny_model(tmp_path / "other", "qwen2", hidden=128, tied=True)
    export.main([base, "--out", str(tmp_path / "q"), "--scheme", "w8a8"])
    cases = {
        "name the model it was trained from with --model": [zero3],
        "its checkpoints are global_step1; choose one with --tag": [zero3, "--model", base, "--tag", "global_step9"],
        "holds no checkpoint: give a Hugging Face directory": [str(tmp_path / "empty")],
        "is no checkpoint of": [zero3, "--model", other],
        "is quantized already": [str(tmp_path / "q"), "--scheme", "w4a16:g64"],
        "at TP 1 use w4a16:g32 or w4a16:g64": [base, "--scheme", "w4a16"],
        "schemes are": [base, "--scheme", "int3"],
        "is the source itself": [base, "--out", base],
        "fp8 needs a GPU": [base, "--scheme", "fp8", "--verify"],
    }
    if not torch.cuda.is_available():
        for message, arguments in cases.items():
            with pytest.raises(SystemExit) as error:
                export.main([*out, *arguments])
            assert message in str(error.value), arguments
        assert not (tmp_path / "out").exists()


def test_engines_by_scheme_and_machine():
    w4, w8, bf16 = map(QuantScheme.parse, ("w4a16:g64", "w8a8", "bf16"))
    assert choose_engine("auto", w4, "cpu", avx512=False) == "qarl"
    assert choose_engine("auto", w4, "cpu", avx512=True) == "vllm"
    assert choose_engine("auto", w8, "cpu", avx512=False) == choose_engine("auto", bf16, "cpu", avx512=False) == "vllm"
    assert choose_engine("auto", QuantScheme.parse("fp8"), "cuda") == "vllm"
    with pytest.raises(QuantError, match="needs AVX512.*--engine qarl"):
        choose_engine("vllm", w4, "cpu", avx512=False)


@pytest.mark.slow
@pytest.mark.parametrize("scheme, engine", [("w8a8", "vllm"), ("bf16", "vllm"), ("w4a16:g64", "qarl"), ("w4a16:g64", "vllm")])
def test_verify_in_vllm(tmp_path, scheme, engine):
    """In a process of its own: a vLLM engine leaves threads and process groups behind."""
    if scheme == "w4a16:g64" and engine == "vllm" and not has_avx512():
        pytest.skip("vLLM's w4a16 kernel for CPUs needs AVX512")
    base = save_tiny_model(tmp_path / "base", "qwen2", hidden=128, tied=True)  # heads of 32: vLLM's smallest in BF16 on a CPU
    command = [sys.executable, "-m", "qarl_openrlhf.cli.export", base, "--out", str(tmp_path / "out"), "--scheme", scheme]
    done = subprocess.run([*command, "--verify", "--engine", engine], capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "508 tokens, |difference of log-probs|" in done.stdout
    assert "--verify: the learner samples 4 texts" in done.stdout and "--verify: starting an engine" in done.stdout


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_every_file_has_the_mode_that_umask_gives(base, tmp_path, scheme, umask):
    before = os.umask(umask)
    try:
        export.main([base, "--out", str(tmp_path / "new" / "out"), "--scheme", scheme])
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert "model.safetensors" in modes and set(modes.values()) == {oct(0o666 & ~umask)}, modes
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "new", tmp_path / "new" / "out")} == {oct(0o777 & ~umask)}


def of_run(checkpoints: Path, tmp_path: Path, scheme: str | None) -> Path:
    """A run's directory whose checkpoints say that they were trained in `scheme`, as `checkpoint.write` says it; None: not ours."""
    run = tmp_path / "run"
    shutil.copytree(checkpoints / "zero2", run / "checkpoints")
    if scheme is not None:
        manifest.write(run / "checkpoints" / "_actor" / "global_step1", {}, {"scheme": scheme})
    return run


SAID = {
    ("w4a16:g64", "w4a16:g64"): "tensors, byte for byte the learner's\n",
    ("w4a16:g64", "bf16"): r"tensors, byte for byte the learner's BF16 parameters \(the run's scheme: w4a16:g64\)\n",
    ("bf16", "bf16"): "tensors, byte for byte the learner's\n",
    ("bf16", "w8a8"): "what w8a8 makes of the weights of .*global_step1, which were trained with bf16\n",
    ("w4a16:g64:rollout", "w4a16:g64"): r"byte for byte what the run's engines had \(its learner's forward was in BF16\)\n",
    ("w4a16:g64:rollout", "w8a8"): "what w8a8 makes of the weights of .*global_step1, which were trained with w4a16:g64:rollout\n",
    (None, "w8a8"): "what w8a8 makes of the weights of .*global_step1, whose training is not known here\n",
    ("nonesuch", "w8a8"): "whose training is not known here\n",
}
OTHERS = [("w4a16:g64", "w4a16:g32"), ("w4a16:g64", "w4a16"), ("w8a8", "w4a16:g64"), ("w4a16:g32", "w8a8"), ("w4a16:g64", "w4a16:g32:rollout")]


@pytest.mark.parametrize("trained, scheme", SAID, ids=str)
def test_what_is_said_of_an_export_is_true(base, checkpoints, tmp_path, capsys, trained, scheme):
    run = of_run(checkpoints, tmp_path, trained)
    export.main([str(run / "checkpoints"), "--model", base, "--out", str(tmp_path / "out"), "--scheme", scheme])
    out = capsys.readouterr().out
    assert re.search(SAID[trained, scheme], out) and ("the learner's\n" in out) == (SAID[trained, scheme].endswith("the learner's\n"))
    assert out.startswith("from global_step1 (newest; --tag chooses another)\n")


@pytest.mark.parametrize("trained, scheme", OTHERS, ids=str)
def test_quantized_training_is_exported_in_its_own_scheme(base, checkpoints, tmp_path, trained, scheme):
    source = of_run(checkpoints, tmp_path, trained) / "checkpoints"
    for form in (source, source / "_actor", source / "_actor" / "global_step1"):
        with pytest.raises(SystemExit) as error:
            export.main([str(form), "--model", base, "--out", str(tmp_path / "out"), "--scheme", scheme])
        wanted = f"--scheme {scheme.removesuffix(':rollout')}: {source}/_actor/global_step1 was trained in {trained}"
        assert wanted in str(error.value) and f"give --scheme {trained}, or leave --scheme out" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_layers_that_are_skipped_are_not_the_learner_s(base, checkpoints, tmp_path, capsys):
    run = of_run(checkpoints, tmp_path, "w8a8")
    words = ["--model", base, "--out", str(tmp_path / "out"), "--scheme", "w8a8", "--skip", "*.layers.0.*"]
    export.main([str(run / "checkpoints"), *words])
    assert "what w8a8 but for the layers of --skip makes of the weights" in capsys.readouterr().out


def test_the_run_s_directory_points_at_its_checkpoints(base, checkpoints, tmp_path):
    run = of_run(checkpoints, tmp_path, "bf16")
    with pytest.raises(SystemExit) as error:
        export.main([str(run), "--model", base, "--out", str(tmp_path / "out")])
    assert str(error.value) == f"export: error: {run} holds no checkpoint itself: give {run / 'checkpoints'}, which does"


def test_which_checkpoint_is_taken(base, checkpoints, tmp_path, capsys):
    actor = of_run(checkpoints, tmp_path, None) / "checkpoints" / "_actor"
    for step in (9, 10):
        shutil.copytree(actor / "global_step1", actor / f"global_step{step}")
    words = ["--model", base, "--out", str(tmp_path / "out")]
    (actor / "latest").write_text("global_step10")
    cases = {
        "from global_step10 (newest; --tag chooses another)": [actor],
        "from global_step9": [actor, "--tag", "global_step9"],
        "from global_step1": [actor / "global_step1"],
    }
    for said, case in cases.items():
        export.main([*map(str, case), *words])
        assert capsys.readouterr().out.splitlines()[0] == said
    (actor / "latest").write_text("global_step11")
    with pytest.raises(SystemExit, match="no checkpoint global_step11, which its file `latest` names: its checkpoints are global_step1, global_step9, global_step10"):
        export.main([str(actor), *words])
    (actor / "latest").unlink()
    with pytest.raises(SystemExit, match="no file `latest`, which names the newest checkpoint: its .* global_step10; choose one with --tag"):
        export.main([str(actor), *words])
