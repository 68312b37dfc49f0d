"""Occupied ports and wrong Ray addresses, with sockets that are really bound."""

import http.server
import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest
import torch.distributed as dist

from qarl_openrlhf.preflight.ports import PortError, holder, named, require_ray_head
from tests.tiny_models import save_tiny_model

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ME = rf"\(process {os.getpid()}\)"


@pytest.fixture
def listening():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_the_holder_of_a_port_is_named(listening):
    assert f"(process {os.getpid()})" in holder(listening)
    assert "no process" in holder(free_port())


def test_a_holder_that_ends_meanwhile_is_no_error_of_its_own(listening, monkeypatch):
    def ended(pid):
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", ended)
    assert holder(listening) == f"process {os.getpid()}, which has ended since"


def test_a_group_on_an_occupied_port_names_port_and_holder(listening):
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", listening, 1, True, wait_for_workers=False)
    error = named(caught.value)
    assert isinstance(error, PortError)
    assert f"port {listening} is in use by" in str(error) and f"(process {os.getpid()})" in str(error)
    assert named(ValueError("something else")) is None


def test_a_ray_address_where_nothing_listens():
    port = free_port()
    with pytest.raises(PortError, match=rf"RAY_ADDRESS 127.0.0.1:{port}: no Ray head answered within 1 s.*no process"):
        require_ray_head(f"127.0.0.1:{port}", timeout_s=1)


def test_a_ray_address_that_another_program_holds(listening):
    with pytest.raises(PortError, match=rf"Port {listening} of this host is held by .*{ME}.*unset RAY_ADDRESS"):
        require_ray_head(f"127.0.0.1:{listening}", timeout_s=1)


def test_a_ray_address_where_a_web_server_answers():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(PortError, match=ME):
            require_ray_head(f"127.0.0.1:{server.server_address[1]}", timeout_s=1)
    finally:
        server.shutdown()


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "http://head:8265"])
def test_other_forms_of_an_address_are_left_to_ray(address):
    require_ray_head(address, timeout_s=1)


@pytest.mark.slow
def test_a_learner_whose_port_has_been_taken_names_port_and_holder(tmp_path, listening):
    """The port of the learners' group is chosen a little before it is used."""
    model = save_tiny_model(tmp_path, "llama", hidden=128)
    code = f"from tests.actors.conftest import build_learner; build_learner({model!r})"
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | group | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    last = done.stderr.strip().splitlines()[-1]
    assert f"PortError: port {listening} is in use by" in last and f"(process {os.getpid()})" in last


@pytest.mark.slow
def test_a_run_at_a_wrong_ray_address_ends_in_one_line(tmp_path, listening):
    model = save_tiny_model(tmp_path / "model", "llama", hidden=128)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 = ", "label": "2"}\n' * 64)
    flags = {
        "actor.model_name_or_path": model, "data.prompt_dataset": tmp_path / "prompts.jsonl", "data.max_len": 64,
        "reward.remote_url": os.path.join(ROOT, "tests", "tiny_reward.py"), "vllm.num_engines": 1, "device": "cpu",
        "actor.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1, "rollout.batch_size": 8, "train.batch_size": 8,
        "rollout.max_new_tokens": 8, "ckpt.output_dir": tmp_path / "out",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *words],
        env=os.environ | {"PYTHONPATH": path, "RAY_ADDRESS": f"127.0.0.1:{listening}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith(f"train_qarl: error: RAY_ADDRESS 127.0.0.1:{listening}: no Ray head"), last
