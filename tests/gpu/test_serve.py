"""`vllm serve` over exports on a GPU: log-probs that come over HTTP are the learner's, in every low-bit scheme."""

import pytest

from qarl_openrlhf.cli import export
from qarl_openrlhf.export import verify as v
from qarl_openrlhf.export.directory import load_learner
from qarl_openrlhf.quant import QuantScheme
from tests.cli.test_serve import LENGTH, log_probs, post, serve
from tests.tiny_models import save_tiny_model

# Beside other tests: a small share of the card, and no measuring of what of it is free.
SMALL = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "268435456"]
LIMITS = {"w4a16": 0.06, "w8a8": 0.15, "fp8": 0.25, "w4a8": 0.25}  # nats, of a random model (test_parity)


@pytest.mark.parametrize("scheme", LIMITS)
def test_served_log_probs_are_the_learners(tmp_path, scheme):
    base = save_tiny_model(tmp_path / "base", "qwen3", hidden=256)
    export.main([base, "--out", str(tmp_path / "export"), "--scheme", scheme])
    model, _ = load_learner(base, QuantScheme.parse(scheme))
    ids = v.learner_text(model, LENGTH)
    mine = v.learner_log_probs(model, ids)
    with serve(tmp_path / "export", tmp_path / "serve.log", *SMALL) as address:
        comparison = v.compare(log_probs(address, ids), mine)
        said = post(address, prompt="1 + 1 =", max_tokens=4, temperature=0)
    print(f"{scheme}: {comparison}")
    assert comparison.mean < LIMITS[scheme]
    assert said["usage"]["completion_tokens"] == 4
