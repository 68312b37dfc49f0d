"""The rollout side of the controller: prompts to the engines, responses back in the order of the prompts."""

import hashlib
from collections.abc import Callable
from itertools import count

import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from qarl_openrlhf.engine.shared_tokenizer import SharedTokenizer


class QarlSamplesGenerator(SamplesGenerator):
    """``SamplesGenerator`` whose rollouts repeat: numbered prompts, engines seeded for each dispatch, responses in order.

    A repeated or resumed run samples the same responses bit for bit if each engine runs one dispatch at a time, i.e. without
    asynchronous training and dynamic filtering.
    """

    shared: SharedTokenizer | None = None
    resumed: dict | None = None
    prompts_sent = 0  # for training; numbers them over the whole run
    evaluating = False
    generated = 0  # calls of the engines
    sampled_tokens = 0  # for training, since the last call of generate_samples
    since = 0  # prompts sampled from for training, after the last whose group passed --algo.dynamic_filtering_enable

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs) -> list:
        if self.shared is None:
            self.shared = SharedTokenizer(self.tokenizer)
        first, kind = (0, "evaluation") if self.evaluating else (self.prompts_sent, "training")
        if not self.evaluating:
            self.prompts_sent += len(prompts)
        samples = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        name, numbers = f"{kind} {first} {_dispatches()}", count(first)
        engines, tokenizer = self.vllm_engines, self.tokenizer
        self.vllm_engines, self.tokenizer = [_NumberingEngine(engine, name, numbers) for engine in engines], self.shared
        try:
            refs = super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
            for index, engine in enumerate(self.vllm_engines):
                slots = [(number, sample) for number in engine.prompts for sample in range(samples)]
                if slots:
                    engine.handle.expect.remote(name, slots, self._seed(kind, first, index))
        finally:
            self.vllm_engines, self.tokenizer = engines, tokenizer
        return refs

    def _seed(self, kind: str, first: int, engine: int) -> int:
        """Of an engine's random generators for a dispatch: the same in a repeated and in a resumed run."""
        key = f"{self.args.train.seed}/{kind}/{first}/{engine}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")

    def _generate_vllm(self, *args, **kwargs):
        self.generated += 1
        before = self.prompts_sent
        experiences, *rest = super()._generate_vllm(*args, **kwargs)
        if not self.evaluating:
            self.since = 0 if experiences else self.since + self.prompts_sent - before
        # OpenRLHF collects them as they come.
        return sorted(experiences, key=lambda experience: experience.slot), *rest

    def _process_response_into_experience(self, response: dict, **kwargs):
        # OpenRLHF's ``info`` must have the same keys in every response, and what a reward logs need not.
        logs = response.get("extra_logs") or {}
        experience = super()._process_response_into_experience(response | {"extra_logs": {}}, **kwargs)
        experience.extra_logs = {name: float(torch.as_tensor(value).flatten()[0]) for name, value in logs.items()}
        experience.slot = response["slot"]
        if not self.evaluating:
            self.sampled_tokens += int(experience.action_mask.sum())  # here: not all of them come out of --algo.dynamic_filtering_enable
        tokens = experience.sequences.shape[1]
        versions = response.get("weight_versions") or [-1] * tokens
        experience.weight_versions = torch.tensor(versions[1:tokens]).unsqueeze(0)  # a field of StampedExperience
        return experience

    def generate_eval_samples(self, **kwargs) -> list:
        self.evaluating = True
        try:
            return super().generate_eval_samples(**kwargs)
        finally:
            self.evaluating = False

    def generate_samples(self, **kwargs):
        if self.resumed:
            state, self.resumed = self.resumed, None
            self.prompts_sent = state["prompts_sent"]
            if state["sample_buffer"] or not state["exhausted"]:
                self._sample_buffer = state["sample_buffer"]
                self._dataloader_iter = None if state["exhausted"] else iter(self.prompts_dataloader)
        before, self.sampled_tokens = self.generated, 0
        result = super().generate_samples(**kwargs)
        for first in result[0][:1]:  # on its way to the trainer with it, which may be another process
            first.sampled_tokens = self.sampled_tokens
        if self.args.vllm.enable_sleep and self.generated == before:  # from the buffer: the publish has woken the engines
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        return result

    def filtered(self) -> dict[str, int]:
        """See ``tell_filtered``."""
        return {"prompts": self.prompts_sent, "since": self.since}

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def rollout_state(self) -> dict:
        """What a checkpoint must keep of this generator besides the position in the prompts."""
        return {
            "sample_buffer": list(getattr(self, "_sample_buffer", [])),  # sampled beyond one training batch
            "exhausted": getattr(self, "_dataloader_iter", None) is None,
            "prompts_sent": self.prompts_sent,
        }

    def resume(self, state: dict) -> None:
        """Go on as the generator whose :meth:`rollout_state` this is. OpenRLHF loads the position in the prompts by itself."""
        self.resumed = state


def mean_logs(samples: list) -> dict[str, float]:
    """The mean of each of the rewards' ``extra_logs``, over the responses that have it; NaN where one of those is."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in getattr(sample, "extra_logs", {}).items():  # an older version's checkpoint may hold samples without
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


_dispatches: Callable[[], int] = count().__next__


class _NumberingEngine:
    """A handle of an engine that gives every prompt its ticket, for the time of one dispatch."""

    def __init__(self, handle, dispatch: str, numbers):
        self.handle, self.dispatch, self.numbers = handle, dispatch, numbers
        self.get_num_unfinished_requests = handle.get_num_unfinished_requests
        self.generate_responses = self
        self.prompts: list[int] = []

    def remote(self, **kwargs):
        number = next(self.numbers)
        self.prompts.append(number)
        return self.handle.generate_responses.remote(**kwargs, ticket=(self.dispatch, number))
