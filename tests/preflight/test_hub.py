"""Local runs ask the hub nothing, and a name that cannot be had is an error at once: against a server that counts."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from qarl_openrlhf.cli import doctor, evaluate, export, prepare_data
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight import hub
from tests.e2e.conftest import argv, flags, prompts, tiny_model  # noqa: F401  fixtures


@pytest.fixture
def server():
    """(URL of a hub that has nothing, the requests it got)."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(f"{self.command} {self.path}")
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}", requests
        http_server.shutdown()


@pytest.fixture
def environment(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    return monkeypatch


def arguments(**changes) -> SimpleNamespace:
    names = dict.fromkeys((*hub.MODELS, *hub.DATASETS)) | {"use_ms": False}
    return SimpleNamespace(**(names | {name.replace("__", "."): value for name, value in changes.items()}))


def cache(tmp_path, folder: str) -> None:
    (tmp_path / "hf" / "hub" / folder / "snapshots" / "0123").mkdir(parents=True)


def test_local_runs_are_offline(environment, tmp_path):
    for name in ("prompts.jsonl", "more.jsonl"):
        (tmp_path / name).write_text("{}\n")
    data = f"{tmp_path}/prompts.jsonl,{tmp_path}/more.jsonl"
    assert hub.settle(arguments(actor__model_name_or_path=str(tmp_path), data__prompt_dataset=data)) == []
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_local_model_whose_code_is_on_the_hub_may_ask(environment, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "owner/code--configuration.Own"}}))
    hub.settle(arguments(actor__model_name_or_path=str(tmp_path)))
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"actor__model_name_or_path": "Qwen/Qwen3-8B"}, "--actor.model_name_or_path Qwen/Qwen3-8B is no directory here"),
        ({"actor__model_name_or_path": "."} | {"data__prompt_dataset": "owner/set"}, "--data.prompt_dataset owner/set is no file or directory here"),
        ({"actor__model_name_or_path": ".", "eval__dataset": "none.jsonl,owner/set@test"}, "--eval.dataset owner/set is no file"),
        ({"actor__model_name_or_path": ".", "data__prompt_dataset": "me/prompts.json1"}, "--data.prompt_dataset me/prompts.json1 is no file"),
    ],
)
def test_a_name_that_cannot_be_had_is_an_error_at_once(environment, tmp_path, changes, message):
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        hub.settle(arguments(**changes))
    assert message in str(error.value) and "http://127.0.0.1:9 is not reachable" in str(error.value)
    assert time.monotonic() - started < hub.TIMEOUT_S + 1
    for_the_model = "for --dry_run --dry_run_gpu_gb GB one with its config.json is enough"
    assert (for_the_model in str(error.value)) == ("--actor" in message)
    environment.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hub.settle(arguments(**changes))


def test_what_is_in_the_cache_is_taken_from_there(environment, tmp_path):
    cache(tmp_path, "models--Qwen--Qwen3-8B")
    cache(tmp_path, "datasets--owner--set")
    notes = hub.settle(arguments(actor__model_name_or_path="Qwen/Qwen3-8B", data__prompt_dataset="owner/set"))
    assert notes == ["Qwen/Qwen3-8B, owner/set: from the cache of the hub, since http://127.0.0.1:9 is not reachable"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_data_set_that_datasets_has_prepared_is_there(environment, tmp_path):
    assert not hub.is_cached("datasets", "HuggingFaceH4/MATH-500")
    (tmp_path / "hf" / "datasets" / "HuggingFaceH4___math-500").mkdir(parents=True)
    (tmp_path / "hf" / "datasets" / "owner___two_words").mkdir()
    assert hub.is_cached("datasets", "HuggingFaceH4/MATH-500") and hub.is_cached("datasets", "owner/TwoWords")
    assert not hub.is_cached("models", "HuggingFaceH4/MATH-500") and not hub.is_cached("datasets", "owner/Two")


@pytest.mark.parametrize(
    "main, words, message",
    [
        (evaluate.main, ["no/model", "--out", "OUT"], "MODEL no/model is no directory here"),
        (evaluate.main, [".", "--out", "OUT", "--tasks", "aime24"], "--tasks aime24: HuggingFaceH4/aime_2024 is not in the cache .*: .*write --tasks aime24=FILE"),
        (export.main, ["runs/ckpt", "--out", "OUT"], "SOURCE runs/ckpt is no directory here"),
        (export.main, [".", "--model", "no/model", "--out", "OUT"], "--model no/model is no directory here"),
        (doctor.main, ["--model", "no/model"], "FAIL  model       --model no/model is no directory here"),
        (prepare_data.main, ["--out", "OUT"], "--train openr1-math-46k: Elliott/.* is not in the cache .*write --train openr1-math-46k=FILE"),
        (prepare_data.main, ["--out", "OUT", "--train", "FILE"], "--eval aime24: .*write --eval aime24=FILE.*--eval alone means none"),
    ],
)  # fmt: skip
def test_the_other_commands_say_so_too(environment, tmp_path, capsys, main, words, message):
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    words = [{"OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "rows.jsonl")}.get(word, word) for word in words]
    environment.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(SystemExit) as error:
        main(words)
    said = f"{error.value.code}\n{capsys.readouterr().out}"
    assert re.search(message, said) and "http://127.0.0.1:9 is not reachable" in said
    assert time.monotonic() - started < hub.TIMEOUT_S + 5 and not (tmp_path / "out").exists()  # doctor loads Ray and vLLM


def test_a_hub_that_answers_is_asked_once_and_left_to_the_libraries(environment, server):
    url, requests = server
    environment.setenv("HF_ENDPOINT", url)
    assert hub.settle(arguments(actor__model_name_or_path="Qwen/Qwen3-8B")) == [] and "HF_HUB_OFFLINE" not in os.environ
    assert requests == ["HEAD /"]
    assert hub.settle(arguments(actor__model_name_or_path="Qwen/Qwen3-8B", use_ms=True)) == [] and len(requests) == 1


def run(wanted: dict, url: str, *extra: str) -> subprocess.CompletedProcess:  # noqa: F811
    clean = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "qarl_openrlhf.cli.train_qarl", *argv(wanted), *extra]
    return subprocess.run(command, env=clean | {"HF_ENDPOINT": url}, capture_output=True, text=True, timeout=500)


def test_a_dry_run_of_local_files_asks_nothing(server, flags, tiny_model):  # noqa: F811
    url, requests = server
    done = run(flags(tiny_model("qwen3", hidden=128)), url, "--dry_run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert requests == []


@pytest.mark.slow
def test_nor_does_a_whole_run(server, flags, tiny_model):  # noqa: F811
    url, requests = server
    done = run(flags(tiny_model("qwen3", hidden=128)) | {"quant.scheme": "w4a16:g32"}, url)
    assert done.returncode == 0, done.stderr[-2000:]
    assert requests == []
