"""Whole runs that fail: the process ends by itself, names what failed, and nothing of it is left."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from qarl_openrlhf.report import load_run
from tests.processes import command_line, wait_for
from tests.tiny_models import save_tiny_model

from .conftest import HERE, argv

pytestmark = pytest.mark.slow

ROOT = os.path.dirname(HERE)
MARK = "QARL_TEST_RUN"


class Run:
    """``train_qarl`` in a session of its own; everything it starts inherits a mark."""

    def __init__(self, wanted: dict, log: Path, prefix: tuple = (), **environment):
        self.mark, self.log = uuid.uuid4().hex, log
        self.metrics = Path(wanted["ckpt.output_dir"], "metrics.jsonl")
        path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *argv(wanted)],
            env=inherited | {"PYTHONPATH": path, MARK: self.mark} | environment,
            stdout=open(log, "w"),  # noqa: SIM115
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """Every process that carries the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def named(self, words: str) -> psutil.Process:
        """The one process of the run with these words in its command line."""
        return wait_for(words, self.alive)

    def wait_for_steps(self, count: int, timeout: float = 400) -> None:
        until = time.monotonic() + timeout
        while not self.metrics.exists() or self.metrics.read_text().count("\n") < count:
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < until, self.text[-3000:]
            time.sleep(0.05)

    def assert_gone(self, timeout: float = 60) -> None:
        until = time.monotonic() + timeout
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(0.5)
        assert not left, [command_line(process)[:100] for process in left]

    def end(self) -> None:
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def start(flags, tiny_model, tmp_path):
    """``start(changes, prefix, **environment)`` -> a started ``Run`` of 16 steps."""
    runs = []

    def make(changes: dict | None = None, prefix: tuple = (), **environment) -> Run:
        wanted = flags(tiny_model("llama", hidden=128)) | {
            "quant.scheme": "w4a16:g32",
            "objective.name": "tbpo",
            "data.max_samples": 64,
            "sync.timeout_s": 40,
        }
        runs.append(Run(wanted | (changes or {}), tmp_path / "log.txt", prefix, **environment))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def assert_one_line(run: Run, words: str) -> str:
    """The run's last line, which has the words; no traceback is before it."""
    last = run.text.splitlines()[-1]
    assert last.startswith("train_qarl: error: ") and words in last, run.text[-3000:]
    assert "Traceback" not in run.text and "ray::" not in run.text, run.text[-3000:]
    return last


def test_a_nan_in_a_master_weight_names_the_layer_before_any_rollout(start, tmp_path):
    model = tmp_path / "model"
    save_tiny_model(model, "llama", hidden=128)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = start({"actor.model_name_or_path": str(model)})
    assert run.process.wait(400) == 1
    assert_one_line(run, "model.layers.1.mlp.down_proj: 1 of 32768 weights are NaN or infinite")
    assert not run.metrics.exists()
    run.assert_gone()


OWN_ERRORS = {  # a tensor of the model that gets a NaN, flags, what the last line says
    "engine": ("model.norm.weight", {}, "ManifestError: tensor model.norm.weight has 1 NaN"),
    "learner": (None, {"actor.adam.lr": 1e30, "ckpt.save_steps": 1}, "log_probs"),
}


@pytest.mark.parametrize("who", OWN_ERRORS)
def test_an_error_of_ours_is_one_line_and_the_advice(start, tmp_path, who):
    tensor, flags, words = OWN_ERRORS[who]
    model = tmp_path / "model"
    save_tiny_model(model, "llama", hidden=128)
    if tensor:
        weights = load_file(model / "model.safetensors")
        weights[tensor][0] = float("nan")
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = start({"actor.model_name_or_path": str(model)} | flags)
    assert run.process.wait(400) == 1
    last = assert_one_line(run, words)
    assert ("the same command with --ckpt.load_enable goes on from checkpoint " in last) == os.path.isdir(run.metrics.parent / "ckpt" / "_actor")
    run.assert_gone()


CALLS = "calls = []\n\n\ndef reward_func(queries, prompts, labels):\n    calls.append(1)\n    return {{'rewards': {}}}\n"
FILTERED = {  # reward, flags, the error's words, what notes say
    "all": ("1.0", {}, "nothing was trained, and no model is written: the groups of all 16 prompts were filtered out", ""),
    "all, asynchronous": ("1.0", {"train.async_enable": True}, "the groups of all 16 prompts were filtered out", ""),
    "too many": (
        "float(len(calls) % 2 and len(calls) < 5)", {"ckpt.save_steps": 1}, "nothing was trained, and no model is written: of 16 prompts", "4 responses make no"
    ),
    "later": ("float(len(calls) % 2 and len(calls) < 17)", {}, None, "after the last step the groups of all 12 prompts were filtered out"),
}  # fmt: skip


@pytest.mark.parametrize("how", FILTERED)
def test_a_run_of_which_the_filter_leaves_nothing_is_an_error_and_no_model(start, tmp_path, how):
    reward, flags, error, note = FILTERED[how]
    path = tmp_path / "reward.py"
    path.write_text(CALLS.format(reward))
    run = start({"reward.remote_url": str(path), "algo.dynamic_filtering_enable": True, "data.max_samples": 16} | flags)
    assert run.process.wait(600) == (1 if error else 0), run.text[-3000:]
    assert note in run.text
    if error:
        assert "--ckpt.load_enable" not in assert_one_line(run, error)
    assert (run.metrics.parent / "model.safetensors").exists() == (error is None)
    assert any(run.metrics.parent.glob("quantized-*")) == (error is None)
    run.assert_gone()


TWO = {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "ds.zero_stage": 3}
CRITIC = {"algo.advantage.estimator": "gae", "critic.num_nodes": 1, "critic.num_gpus_per_node": 1}
KILLED = {  # words in its command line, flags, what the run's last line must say
    "engine": ("VLLM::EngineCore", {}, r"engine 0: .*died"),
    "engine's actor": ("ray::QarlRolloutActor", {}, r"engine 0: its process \(pid {pid} on [\d.]+\) ended without a word: by SIGKILL"),
    "learner": ("ray::QarlPolicyActor", {}, r"learner, rank 0: its process \(pid {pid} on [\d.]+\) ended without a word: by SIGKILL .*--ds.adam_offload"),
    "one of two learners": ("ray::QarlPolicyActor", TWO, r"learner, rank [01]: its process \(pid {pid} on [\d.]+\) ended without a word"),
    "reference": ("ray::ReferenceModelActor", {"algo.kl.init_coef": 0.01}, r"reference, rank 0: its process \(pid {pid} on [\d.]+\) ended"),
    "critic": ("ray::CriticModelActor", CRITIC, r"critic, rank 0: its process \(pid {pid} on [\d.]+\) ended without a word"),
    "controller": ("ray::QarlPPOTrainer", {}, r"controller: its process \(pid {pid} on [\d.]+\) ended without a word"),
    "asynchronous": ("ray::QarlPolicyActor", {"train.async_enable": True}, r"learner, rank 0: its process \(pid {pid} on [\d.]+\) ended"),
}


@pytest.mark.parametrize("who", KILLED)
def test_a_killed_process_ends_the_run_with_one_line_and_leaves_none(start, tiny_model, who):
    words, flags, message = KILLED[who]
    if who == "critic":
        flags = flags | {"critic.model_name_or_path": tiny_model("llama", hidden=128)}
    run = start({"ckpt.save_steps": 1} | flags)
    run.wait_for_steps(2)
    killed = run.named(words)
    killed.kill()
    assert run.process.wait(120) == 1
    last = assert_one_line(run, "")
    assert re.search(message.format(pid=killed.pid), last), last
    assert "the same command with --ckpt.load_enable goes on from checkpoint " in last
    run.assert_gone()


def test_a_learner_that_is_killed_while_it_loads_is_one_line(start):
    run = start()
    until = time.monotonic() + 200
    while "start: learner loads its model ..." not in run.text and time.monotonic() < until:
        time.sleep(0.05)
    killed = run.named("ray::QarlPolicyActor")
    killed.kill()
    assert run.process.wait(120) == 1
    assert_one_line(run, f"learner, rank 0: its process (pid {killed.pid} on ")
    run.assert_gone()


def test_an_engine_that_is_killed_while_it_starts_is_one_line(start):
    run = start()
    until = time.monotonic() + 200
    while not (cores := [process for process in run.alive() if "VLLM::EngineCore" in command_line(process)]) and time.monotonic() < until:
        time.sleep(0.02)
    cores[0].kill()
    assert run.process.wait(120) == 1
    assert_one_line(run, f"engine 0: vLLM did not start: its process (pid {cores[0].pid}) was ended by SIGKILL")
    run.assert_gone()


REWARDS = {  # what the file holds before its function, the function's body, what the error says
    "raises": (
        "def inner():\n    raise KeyError('oops')\n",
        "inner()",
        ["reward {path}: KeyError: 'oops' (line 2 in inner, prompt that ends '"],
    ),
    "ends the engine's process": (
        "import os\n\n",
        "os._exit(3)",
        ["engine 0: its process (pid ", "ended by itself with exit code 3: os._exit at {path}:5 in reward_func", "{path} runs in that process"],
    ),
}


@pytest.mark.parametrize("how", REWARDS)
def test_a_reward_that_fails_is_the_one_line_error_of_the_run(start, tmp_path, how):
    before, body, words = REWARDS[how]
    reward = tmp_path / "reward.py"
    reward.write_text(f"{before}\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    run = start({"reward.remote_url": str(reward)})
    assert run.process.wait(400) == 1
    last = run.text.splitlines()[-1]
    assert last.startswith(f"train_qarl: error: {words[0].format(path=reward)}"), run.text[-3000:]
    assert all(word.format(path=reward) in last for word in words), last
    assert "Traceback" not in run.text
    run.assert_gone()


def test_a_machine_that_fills_up_ends_the_run_with_one_line(start):
    """Ray ends a process of the run before the kernel would: which one is its choice."""
    memory = psutil.virtual_memory()
    limit = 0.5 + memory.used / memory.total / 2
    run = start({"ckpt.save_steps": 1, "train.num_episodes": 20}, RAY_memory_usage_threshold=str(limit))
    run.wait_for_steps(2)
    filled = []
    until = time.monotonic() + 60
    while run.process.poll() is None and time.monotonic() < until:
        if psutil.virtual_memory().percent < 100 * limit + 2:
            filled.append(b"1" * 2**28)
        else:
            time.sleep(0.1)
    del filled
    assert run.process.wait(60) == 1, run.text[-3000:]
    last = run.text.splitlines()[-1]
    assert re.search(r"error: main memory of node [\d.]+ was nearly full \([\d.]+ of [\d.]+ GB; Ray's limit is \d\d %\) and Ray ended ", last), run.text[-3000:]
    assert "Largest there: " in last and "the same command with --ckpt.load_enable goes on from checkpoint " in last
    assert "Traceback" not in run.text
    run.assert_gone()


@pytest.mark.parametrize(
    "how, send",
    [(signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg), (signal.SIGHUP, os.killpg)],
    ids=["interrupted", "terminated", "terminated with its Ray head", "hung up"],
)
def test_a_signal_ends_the_run_with_one_line(start, how, send):
    run = start({"ckpt.save_steps": 1})
    run.wait_for_steps(2)
    send(run.process.pid, how)
    assert run.process.wait(50) == 128 + how
    word = "interrupted" if how == signal.SIGINT else "terminated"
    saved = re.escape(os.path.join(run.metrics.parent, "ckpt", "_actor", "global_step"))
    line = rf"train_qarl: {word} \({how.name}\): the same command with --ckpt.load_enable goes on from checkpoint {saved}\d+"  # steps take 0.3 s: which one it is depends on the machine
    assert re.fullmatch(line, run.text.splitlines()[-1])
    assert "***" not in run.text and "Traceback" not in run.text and "Error" not in run.text
    run.assert_gone()


def test_a_run_is_terminated_while_ray_starts(start):
    run = start()
    until = time.monotonic() + 100
    while "start: Ray ..." not in run.text and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)
    run.process.terminate()
    assert run.process.wait(120) == 128 + signal.SIGTERM
    assert run.text.splitlines()[-1].startswith("train_qarl: terminated (SIGTERM): no checkpoint had been written to ")
    assert "***" not in run.text and "Traceback" not in run.text
    run.assert_gone()


def test_a_killed_driver_leaves_no_process(start):
    run = start()
    run.wait_for_steps(1)
    run.process.kill()
    assert run.process.wait(120) != 0
    run.assert_gone()


def test_taken_ports_and_a_containers_shm_do_not_matter(start):
    """Ray's well-known ports, torch's default, and the one vLLM is told to use are taken; /dev/shm has 64 MiB."""
    flags = ["-m"] if os.getuid() == 0 else ["-Urm"]
    mount = ["bash", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "run"]
    if subprocess.run(["unshare", *flags, *mount, "true"], capture_output=True).returncode:
        flags, mount = [], []
    with ExitStack() as stack:
        taken = []
        for port in (6379, 8265, 10001, 52365, 29500, 0):
            held = stack.enter_context(socket.socket())
            try:
                held.bind(("", port))
            except OSError:
                continue  # somebody else's: taken as well
            held.listen()
            taken.append(held.getsockname()[1])
        run = start({"data.max_samples": 8}, prefix=("unshare", *flags, *mount) if mount else (), VLLM_PORT=str(taken[-1]))
        assert run.process.wait(500) == 0, run.text[-3000:]
    assert [row["step"] for row in load_run(run.metrics.parent).rows] == [1, 2]
    if mount:
        assert "note: Ray's object store is in" in run.text
    run.assert_gone()
