"""Weight versions a token: from a response to the micro-batch, and what is reported of them."""

import pickle
import subprocess
import sys

import pytest
import torch

from qarl_openrlhf.metrics import weight_lag
from qarl_openrlhf.metrics.accumulate import Sums


def reduced(*parts):
    sums = Sums()
    for part in parts:
        sums.merge(weight_lag.statistics(*part))
    return sums.metrics()


VERSIONS = torch.tensor([[-1, 4, 4, 5, 0], [-1, 9, 9, 9, 9], [3, -1, -1, 6, 9], [-1, -1, 0, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 1, 1], [0, 1, 0, 0, 0]])  # the last: an agent's own token


def test_lags_of_mixed_responses():
    metrics = reduced((VERSIONS, MASK, 9))
    assert metrics == pytest.approx(
        {
            "async/version_lag_mean": (5 + 5 + 4 + 6 + 3) / 10,
            "async/version_lag_max": 6.0,
            "async/tokens_stale_fraction": 5 / 10,
            "async/tokens_by_lag/0": 5 / 10,
            "async/tokens_by_lag/1": 0.0,
            "async/tokens_by_lag/2": 0.0,
            "async/tokens_by_lag/3": 1 / 10,
            "async/tokens_by_lag/4": 4 / 10,
            "async/responses_mixed_fraction": 2 / 3,
            "async/tokens_unknown_fraction": 1 / 11,
        }
    )
    assert reduced(*[(VERSIONS[i : i + 1], MASK[i : i + 1], 9) for i in range(4)]) == pytest.approx(metrics)


def test_versions_follow_their_tokens_through_openrlhf_batching():
    """Response -> Experience -> padded batch -> replay buffer -> another batch: still one version a token, in place."""
    from qarl_openrlhf import patches

    patches.apply()
    from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
    from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

    from qarl_openrlhf.actors import trainer

    def experience(prompt, versions, room=64):
        """The token that version v sampled is 100 + v."""
        ids = [*range(10, 10 + prompt), *[100 + v if v >= 0 else 50 for v in versions]]
        ranges, start = [], None
        for i, v in enumerate([*versions, -1]):
            if v >= 0 and start is None:
                start = i
            if v < 0 and start is not None:
                ranges.append((prompt + start, prompt + i))
                start = None
        response = {
            "prompt": "p", "label": "l", "observation_tokens": ids, "action_ranges": ranges, "reward": 1.0, "scores": 1.0,
            "rollout_log_probs": [-float(i) for i in ids], "weight_versions": [-1] * prompt + versions, "slot": (0, 0),
        }  # fmt: skip
        generator = object.__new__(trainer.QarlSamplesGenerator)
        return generator._process_response_into_experience(response, max_len=room)

    made = [
        experience(5, [1, 1, 2, 2, 2]),
        experience(2, [3, 3, -1, -1, 4, 4, 5]),  # two turns
        experience(3, [1, 2, 3, 4, 5, 6], room=7),  # cut off
    ]
    assert type(made[0]).__name__ == "StampedExperience" and isinstance(made[0], Experience)
    buffer = NaiveReplayBuffer(2, 0, True)
    buffer.append(Experience.concat_experiences(made, pad_token_id=0))
    again = make_experience_batch(split_experience_batch(buffer.collate_fn(buffer.items[::-1])))
    for batch in (buffer.collate_fn(buffer.items), again):
        assert batch.weight_versions.shape == batch.action_mask.shape and batch.weight_versions.dtype == torch.int64
        mask = batch.action_mask.bool()
        assert torch.equal(batch.weight_versions[mask] + 100, batch.sequences[:, 1:][mask])
        assert int(mask.sum()) == 5 + 5 + 4
        assert torch.equal(batch.rollout_log_probs[mask], -batch.sequences[:, 1:][mask].float())


def test_an_experience_is_unpickled_where_nothing_is_patched():
    """Ray's queue of an asynchronous run is such a process: no flash_attn stub, no patches."""
    from qarl_openrlhf.patches.openrlhf_experience import StampedExperience

    made = StampedExperience(weight_versions=torch.tensor([[-1, 3]]))
    code = (
        "import pickle, sys; e = pickle.loads(sys.stdin.buffer.read()); print(e.weight_versions.tolist(), "
        "'qarl_openrlhf.actors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(made), capture_output=True, timeout=120)
    assert done.stdout.decode().split("\n")[0] == "[[-1, 3]] False", done.stderr.decode()[-2000:]
