"""wandb without its server, or with what it does not take, is one line that names the flag; with the real wandb."""

import http.server
import threading
from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.actors.tracking import QarlWandbLogger, TrackingError
from qarl_openrlhf.cli.own_errors import own_message
from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.tracking import check_wandb

NOBODY = "http://127.0.0.1:9"  # the port of "discard", where nothing listens


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_BASE_URL": NOBODY, "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def args(key):
    wandb = N(key=key, org=None, project="p", group=None, run_name="r")
    return N(logger=N(wandb=wandb))


def test_without_a_server_it_is_refused_and_the_way_out_is_named():
    with pytest.raises(ConfigError, match=rf"^--logger.wandb.key: {NOBODY} is not reachable: WANDB_MODE=offline [^\n]*$"):
        check_wandb(args("k" * 40))


def test_without_a_key_nobody_is_asked(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    check_wandb(args(None))
    with pytest.raises(ConfigError, match="needs the package wandb"):
        check_wandb(args("key"))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_is_fine(monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    check_wandb(args("key"))


def test_what_wandb_offline_wrote_counts(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    check_wandb(args("key"))


def test_a_server_that_answers_is_fine(monkeypatch):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        check_wandb(args("key"))
    finally:
        server.shutdown()
        server.server_close()


def test_what_wandb_refuses_later_is_one_line_of_ours():
    with pytest.raises(TrackingError, match=r"^--logger.wandb.key: wandb does not start: [^\n]*WANDB_MODE=offline[^\n]*$") as error:
        QarlWandbLogger(args("too short"))
    assert own_message(error.value)
