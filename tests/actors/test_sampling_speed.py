"""Tokens a second are of all that engines sampled in the step's own time, whatever the step trains on."""

from types import SimpleNamespace as N

import pytest
from openrlhf.trainer.ppo_utils import samples_generator

from qarl_openrlhf.actors import trainer
from qarl_openrlhf.actors.samples import QarlSamplesGenerator

TOKENS = 5  # a response


class Generator(QarlSamplesGenerator):
    """Two responses to each of eight prompts; those to the prompts 1, 4 and 7 both solve it, and are filtered out."""

    def _dispatch_prompts_to_vllm(self, prompts, labels, **kwargs):
        self.prompts_sent += len(prompts)
        common = {"observation_tokens": list(range(2 + TOKENS)), "action_ranges": [(2, 2 + TOKENS)], "rollout_log_probs": None}
        common |= {"truncated": False, "label": "l"}
        scores = {p: (1.0, float(p % 3 == 1)) for p in prompts}
        return [[common | {"prompt": p, "slot": (p, i), "reward": r, "scores": r} for i, r in enumerate(scores[p])] for p in prompts]


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.setattr(samples_generator, "ray", N(wait=lambda refs, **_: (refs[:1], refs[1:]), get=lambda ref: ref))
    made = Generator.__new__(Generator)
    made.args = N(
        rollout=N(batch_size=2, n_samples_per_prompt=2, vllm_generate_batch_size=None),
        vllm=N(enable_sleep=False),
        algo=N(dynamic_filtering_enable=False, dynamic_filtering_range=(0.0, 1.0)),
    )
    made.prompts_dataloader = [(None, [p], ["l"], [None]) for p in range(8)]
    return made


def steps(generator) -> list[tuple[int, int]]:
    """(tokens of the rollout, tokens sampled) of each step of an episode."""
    found, exhausted = [], False
    while not exhausted:
        rollout, _, _, exhausted = generator.generate_samples()
        if rollout:
            found.append((sum(int(s.action_mask.sum()) for s in rollout), rollout[0].sampled_tokens))
    return found


def test_of_plain_rollouts(generator):
    assert steps(generator)[:4] == [(4 * TOKENS, 4 * TOKENS)] * 4


def test_what_is_filtered_out_was_sampled(generator):
    generator.args.algo.dynamic_filtering_enable = True
    assert steps(generator)[:2] == [(4 * TOKENS, 6 * TOKENS), (4 * TOKENS, 6 * TOKENS)]


def test_a_rollout_that_had_been_sampled_takes_no_time(generator):
    generator.args.rollout.vllm_generate_batch_size = 4
    assert steps(generator)[:4] == [(4 * TOKENS, 8 * TOKENS), (4 * TOKENS, 0), (4 * TOKENS, 8 * TOKENS), (4 * TOKENS, 0)]


@pytest.mark.parametrize("sampled, speed", [(600, 300.0), (0, None)])
def test_tokens_a_second(monkeypatch, sampled, speed):
    class OpenRLHFs:
        def save_logs_and_checkpoints(self, *_):
            pass

    class Reporting(trainer.ReportingTrainer, OpenRLHFs):
        def __init__(self):
            pass

    monkeypatch.setattr(trainer, "still_line", lambda *_: None)
    controller, rows = Reporting(), []
    controller.args, controller.sampled_tokens = None, sampled
    controller.metrics_writer = N(write=lambda step, row: rows.append(row))
    status = {"rollout/tokens": 400.0, "timing/generation": 2.0}
    controller.save_logs_and_checkpoints(3, status)
    assert rows[0].get("rollout/tok_per_s") == speed
