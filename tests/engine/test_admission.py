"""The same dispatch with the same seed samples the same responses, bit for bit, in whatever order its prompts arrive."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import ray
from vllm import SamplingParams

from qarl_openrlhf.engine.admission import Admission
from qarl_openrlhf.engine.stops import as_tokens

from tests.tiny_models import make_tokenizer

from . import tiny

PARAMS = SamplingParams(temperature=1.0, max_tokens=24)


def dispatch(engine, name, *, seed, order, samples=3):
    """Send prompts in an order of their own; returns {slot: (tokens, log-probs)}."""
    tokenizer = ray.put(tiny.tokenizer())
    prompts = {number: f"ab {'c' * number} d" for number in order}
    calls = [
        engine.generate_responses.remote(
            prompts[number], "", PARAMS, 64, tokenizer, num_samples=samples, ticket=(name, number)
        )
        for number in order
    ]
    engine.expect.remote(name, [(number, sample) for number in order for sample in range(samples)], seed)
    found = [response for responses in ray.get(calls, timeout=120) for response in responses]
    return {r["slot"]: (r["observation_tokens"], r["rollout_log_probs"]) for r in found}


def test_a_dispatch_repeats(qwen3):
    qwen3.publish()
    engine, order = qwen3.engines[0], list(range(8))
    first = dispatch(engine, "a", seed=1, order=order)
    assert len(first) == 24 and len({str(tokens) for tokens, _ in first.values()}) > 12
    for trial in range(2):
        random.Random(trial).shuffle(order)
        assert dispatch(engine, f"b{trial}", seed=1, order=order) == first
    assert dispatch(engine, "c", seed=2, order=sorted(order)) != first


def test_without_a_ticket_nothing_waits(qwen3):
    qwen3.publish()
    responses = ray.get(qwen3.engines[0].generate_responses.remote("ab", "", PARAMS, 64, tiny.tokenizer()), timeout=60)
    assert "slot" not in responses[0]


class Engine:
    """What ``Admission`` sees of vLLM: enough to count and to log."""

    def __init__(self, unfinished=0):
        self.unfinished, self.log = unfinished, []
        self.output_processor = self

    def get_num_unfinished_requests(self):
        return self.unfinished

    async def pause_generation(self, mode, clear_cache):
        self.log.append("pause")

    async def collective_rpc(self, method, args):
        self.log.append((method, *args))

    async def resume_generation(self):
        self.log.append("resume")


async def ready():
    pass


async def ask(admission, engine, slot, *, delay=0.0, fail=False):
    try:
        await asyncio.sleep(delay)
        await admission.enter("d", slot)
        await asyncio.sleep(0)
        if fail:
            raise ValueError("refused")
        engine.unfinished += 1
        engine.log.append(slot)
    finally:
        admission.left("d", slot)


def run(*asks, engine=None, expected=None, patience_s=5.0, is_ready=ready):
    engine = engine or Engine()

    async def go():
        admission = Admission(engine, is_ready, patience_s)
        tasks = [asyncio.ensure_future(ask(admission, engine, **a)) for a in asks]
        await asyncio.sleep(0.01)
        admission.expect("d", expected or [a["slot"] for a in asks], seed=7)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        await asyncio.sleep(0)
        assert not admission._dispatches, "kept for ever"
        return results

    return engine.log, asyncio.run(go())


def test_they_enter_by_slot_while_the_engine_is_paused():
    log, _ = run(*[{"slot": (3 - i, 0), "delay": 0.002 * i} for i in range(4)])
    assert log == ["pause", ("qarl_seed", 7), (0, 0), (1, 0), (2, 0), (3, 0), "resume"]


def test_one_that_fails_does_not_hold_the_others():
    log, results = run({"slot": (0, 0), "fail": True}, {"slot": (1, 0)})
    assert log[2:] == [(1, 0), "resume"] and isinstance(results[0], ValueError)


def test_a_busy_engine_is_neither_paused_nor_seeded():
    log, _ = run({"slot": (1, 0)}, {"slot": (0, 0)}, engine=Engine(unfinished=5))
    assert sorted(log) == [(0, 0), (1, 0)]


def test_who_comes_while_the_others_enter_goes_in_after_them():
    class Slow(Engine):
        async def resume_generation(self):
            await asyncio.sleep(0.1)
            await super().resume_generation()

    asks = [{"slot": (i, 0), "delay": 0.005 * i} for i in range(64)]
    log, results = run(*asks, engine=Slow(), patience_s=0.15)
    assert results == [None] * 64 and sorted(entry for entry in log[2:] if entry != "resume") == [a["slot"] for a in asks]
    assert log.index("resume") < 64  # some were late


def test_the_late_do_not_hold_the_others_for_ever():
    log, _ = run({"slot": (0, 0)}, {"slot": (1, 0), "delay": 0.5}, patience_s=0.1)
    assert log == ["pause", ("qarl_seed", 7), (0, 0), "resume", (1, 0)]


def test_an_engine_that_cannot_generate_tells_all_who_wait():
    async def broken():
        raise RuntimeError("weights are FAILED")

    log, results = run({"slot": (0, 0)}, {"slot": (1, 0)}, is_ready=broken)
    assert log == [] and [str(r) for r in results] == ["weights are FAILED"] * 2


@pytest.mark.parametrize(
    ("stop", "strings", "single"),
    [(["e"], [], "e"), (["ab", "e"], ["ab"], "e"), ([], [], None), ([" "], [" "], None), (["ab"], ["ab"], None), (["é"], ["é"], None)],
)
def test_stop_strings_of_one_character_become_tokens(stop, strings, single):
    tokenizer = tiny.tokenizer()
    kept, tokens = as_tokens(stop, tokenizer, model_that_ends_with())
    assert kept == strings
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    containing = [i for i, text in enumerate(texts) if single and single in text and text != "<eos>"]
    assert tokens == containing and bool(tokens) == bool(single)


def test_what_ends_a_response_anyway_is_no_stop_token():
    tokenizer = make_tokenizer()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    bar, endoftext, start, end, pad = tokenizer.convert_tokens_to_ids(["|", *names])
    assert tokenizer.eos_token_id == end
    for more, rest in ((None, [endoftext, start, pad, bar]), (pad, [endoftext, start, bar]), ([end, endoftext], [start, pad, bar])):
        assert as_tokens(["|"], tokenizer, model_that_ends_with(more)) == ([], sorted(rest))


def model_that_ends_with(more=None) -> SimpleNamespace:
    """What ``as_tokens`` sees of vLLM's model config. more: eos_token_id of a generation_config.json."""
    return SimpleNamespace(try_get_generation_config=lambda: {} if more is None else {"eos_token_id": more})
