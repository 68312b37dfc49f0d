"""`vllm serve` over an export: log-probs that come over HTTP, by OpenAI's completions endpoint, are the learner's."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from qarl_openrlhf import runtime
from qarl_openrlhf.cli import export
from qarl_openrlhf.engine.cpu_method import METHOD
from qarl_openrlhf.engine.offline import MEMORY, has_avx512
from qarl_openrlhf.export import verify as v
from qarl_openrlhf.export.directory import load_learner
from qarl_openrlhf.patches.vllm_cpu import serve_command
from qarl_openrlhf.quant import QuantScheme
from tests.tiny_models import save_tiny_model

LENGTH = 64
START_S = 600
NEEDS_AVX512 = pytest.mark.skipif(not has_avx512(), reason="vLLM's w4a16 kernel for CPUs needs AVX512")


@contextmanager
def serve(directory, log: Path, *flags: str):
    """Yields the address of a `vllm serve` over a directory; every process of its session has ended afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    device = runtime.resolve_device("auto")
    environment = os.environ | runtime.set_environment(device)
    here = Path(sys.executable)
    first, *words = shlex.split(serve_command(str(directory)))
    command = [str({"python": here, "vllm": here.with_name("vllm")}[first]), *words, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "exported", "--max-model-len", str(LENGTH + 1), "--enforce-eager"]
    command += flags if device == "cpu" else ["--gpu-memory-utilization", str(MEMORY[device]), *flags]
    with open(log, "w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _answers(address):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        server.wait()


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def post(address: str, **request) -> dict:
    data = json.dumps({"model": "exported", **request}).encode()
    wanted = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(wanted, timeout=120) as answer:
        return json.load(answer)


def log_probs(address: str, ids: torch.Tensor) -> torch.Tensor:
    """float32 [B, L - 1] of ids [B, L]: the prompts echoed with their log-probs."""
    answer = post(address, prompt=ids.tolist(), max_tokens=1, echo=True, logprobs=0, temperature=1.0)
    rows = [
        choice["logprobs"]["token_logprobs"][: ids.shape[1]]
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]
    assert [row[0] for row in rows] == [None] * len(rows)  # nothing comes before the first token
    return torch.tensor([row[1:] for row in rows])


class Served(NamedTuple):
    """What a server over an export said. base: the BF16 directory; ids [B, L] with the learner's log-probs of them; said: a completion."""

    base: str
    ids: torch.Tensor
    learner: torch.Tensor
    comparison: v.Comparison
    said: dict
    address: str


def served(tmp_path, scheme: str, hidden: int, *flags: str) -> Served:
    """Export a tiny model, serve it and ask for the learner's text; the server has ended afterwards."""
    base = save_tiny_model(tmp_path / "base", "qwen3", hidden=hidden)
    export.main([base, "--out", str(tmp_path / "export"), "--scheme", scheme])
    model, _ = load_learner(base, QuantScheme.parse(scheme))
    ids = v.learner_text(model, LENGTH)
    mine = v.learner_log_probs(model, ids)
    with serve(tmp_path / "export", tmp_path / "serve.log", *flags) as address:
        comparison = v.compare(log_probs(address, ids), mine)
        return Served(base, ids, mine, comparison, post(address, prompt="1 + 1 =", max_tokens=4, temperature=0), address)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme, flags",
    [
        ("bf16", []),
        ("w8a8", []),
        pytest.param("w4a16:g64", [], marks=NEEDS_AVX512),
        # our own method, as rollouts on a CPU have it: registered in the server by the installed plugin
        ("w4a16:g64", ["--quantization", METHOD, "--hf-overrides", json.dumps({"quantization_config": {"quant_method": METHOD, "scheme": "w4a16:g64"}})]),
    ],
    ids=["bf16", "w8a8", "w4a16", "w4a16-qarl"],
)  # fmt: skip
def test_served_log_probs_are_the_learners(tmp_path, scheme, flags):
    found = served(tmp_path, scheme, 128, *flags)  # heads of 32: vLLM's smallest in BF16 on a CPU
    comparison = found.comparison
    print(f"{scheme} {'by our method' if flags else 'by vLLM'}: {comparison}")
    assert comparison.mean < v.TOLERANCE
    if scheme.startswith("w4a16"):  # and not the BF16 weights', which are further away (those of 8 bits are not)
        plain, _ = load_learner(found.base, QuantScheme.parse("bf16"))
        assert v.compare(v.learner_log_probs(plain, found.ids), found.learner).mean > 2 * comparison.mean
    assert found.said["usage"]["completion_tokens"] == 4 and found.said["choices"][0]["text"]
    assert not _answers(found.address)
