"""What a run says that dynamic filtering has left little of, or nothing (whole runs: tests/e2e/test_faults.py)."""

from types import SimpleNamespace as N

import pytest

from qarl_openrlhf.actors.filtering import NothingTrainedError, tell_filtered

ARGS = N(algo=N(dynamic_filtering_enable=True, dynamic_filtering_range=(0, 1)), train=N(batch_size=8))
GOOD = {"prompts": 32, "since": 0, "steps": 4, "filled": 4, "resumed": False}


@pytest.mark.parametrize("change, words", [
    ({"steps": 0, "filled": 0, "since": 32}, "nothing was trained.*all 32 prompts.*not between 0 and 1 .--algo.dynamic_filtering_range"),
    ({"filled": 0}, "nothing was trained.*of 32 prompts.*--train.batch_size 8"),
])  # fmt: skip
def test_nothing_trained_is_an_error(change, words):
    with pytest.raises(NothingTrainedError, match=words):
        tell_filtered(ARGS, **GOOD | change)


@pytest.mark.parametrize("change, words", [
    ({}, None),
    ({"filled": 1, "since": 5}, "after the last step the groups of all 5 prompts"),
    ({"steps": 0, "filled": 0, "since": 5, "resumed": True}, "all 5 prompts"),  # the checkpoint's policy is a result
    ({"steps": 0, "filled": 0, "prompts": 0}, None),  # nothing was left to do
])  # fmt: skip
def test_other_ends_are_a_note_or_nothing(change, words):
    told = tell_filtered(ARGS, **GOOD | change)
    assert told is None if words is None else words in told


def test_without_filtering_nothing_is_said():
    args = N(algo=N(dynamic_filtering_enable=False), train=N(batch_size=8))
    assert tell_filtered(args, **GOOD | {"steps": 0, "filled": 0, "since": 9}) is None
