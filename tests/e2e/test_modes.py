"""OpenRLHF's other modes with a quantized scheme, two steps each: they run, publish, and stay aligned."""

import http.server
import json
import math
import os
import threading

import pytest

from qarl_openrlhf import runtime
from qarl_openrlhf.cli import train_qarl
from qarl_openrlhf.report import load_run

from .conftest import HERE, argv

pytestmark = pytest.mark.slow

MODES = {
    "async": {"train.async_enable": True, "train.async_queue_size": 1},
    "async-partial-rollout": {"train.async_enable": True, "train.partial_rollout_enable": True},
    "multi-turn": {"train.agent_func_path": os.path.join(HERE, "e2e", "modes_agent.py"), "reward.remote_url": None},
    "gae-critic": {
        "algo.advantage.estimator": "gae", "critic.num_nodes": 1, "critic.num_gpus_per_node": 1, "critic.adam.lr": 1e-3,
    },
    "ema-zero3": {"train.enable_ema": True, "ds.zero_stage": 3},
    "colocated-sleep": {"train.colocate_all": True, "ds.enable_sleep": True, "vllm.enable_sleep": True},
    "dynamic-filtering": {"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": [0.01, 0.99]},
    "tensor-parallel-engine": {"vllm.tensor_parallel_size": 2},
    "two-engines": {"vllm.num_engines": 2},
    "two-learners-zero3": {"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "ds.zero_stage": 3, "algo.kl.init_coef": 0.01},
    "packed-dynamic-batches": {"ds.packing_samples": True, "train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 128},
    "reward-server": {},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def ray_head():
    import ray

    environment = runtime.set_environment("cpu")
    runtime.start_ray("cpu", runtime.ResourcePlan({"actor": 8}), environment, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def reward_server():
    """A reward server as OpenRLHF calls it: POST {query, prompts, labels} -> {rewards, scores, extra_logs}."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            score = float(len(asked["query"][0]) % 2 == 0)
            body = json.dumps({"rewards": score, "scores": score, "extra_logs": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/get_reward"
    server.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_two_steps(mode, tiny_model, flags, reward_server):
    model = tiny_model("qwen3", hidden=128, tied=False)
    wanted = flags(model, mode) | {
        "quant.scheme": "w4a16:g32",
        "objective.name": "tbpo",
        "sync.verify": "readback",
        "sync.probe_tol": 0.1,
    }
    wanted |= MODES[mode]
    if mode == "gae-critic":
        wanted["critic.model_name_or_path"] = model
    if mode == "reward-server":
        wanted["reward.remote_url"] = reward_server
    train_qarl.main(argv({name: value for name, value in wanted.items() if value is not None}))

    rows = load_run(wanted["ckpt.output_dir"]).rows
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sync/checksum_ok"] == 1 and row["sync/probe_abs_logp"] < 0.1
        assert row["objective/in_band_frac_by_update/0"] == 1.0
        assert math.isfinite(row["reward"])
        assert row["async/tokens_unknown_fraction"] == 0.0
        assert row["async/version_lag_max"] <= (2.0 if mode.startswith("async") else 0.0)
    # Asynchronous rollouts may be one version behind; synchronous ones come from the weights that are trained.
    assert rows[-1]["mismatch/abs_logp_mean"] < (0.5 if mode.startswith("async") else 0.05)
