"""`vllm serve` over exports on a GPU: log-probs that come over HTTP are the learner's, in every low-bit scheme."""

import pytest

from tests.cli.test_serve import served

# Beside other tests: a small share of the card, and no measuring of what of it is free.
SMALL = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "268435456"]
LIMITS = {"w4a16": 0.06, "w8a8": 0.15, "fp8": 0.25, "w4a8": 0.25}  # nats, of a random model (test_parity)


@pytest.mark.parametrize("scheme", LIMITS)
def test_served_log_probs_are_the_learners(tmp_path, scheme):
    found = served(tmp_path, scheme, 256, *SMALL)
    print(f"{scheme}: {found.comparison}")
    assert found.comparison.mean < LIMITS[scheme]
    assert found.said["usage"]["completion_tokens"] == 4
