"""How many responses an engine samples at a time on a GPU."""

import json
import math

from qarl_openrlhf.engine.engine_args import engine_args
from qarl_openrlhf.planning.memory import AT_ONCE, SAMPLED, complete, estimate
from qarl_openrlhf.planning.model_shape import ModelShape, kv_bytes_per_token

MOST = 512  # logits of more take gigabytes of a large vocabulary, and decoding is bound by arithmetic then, not by the weights
LONGEST = 4  # times as long as a response on average is the longest, about


def settle(args, shape: ModelShape, card: int | None) -> list[str]:
    """Give each engine a place for all of its responses of a rollout, if they find room in its KV cache; notes on what was chosen.

    A step of decoding reads all weights, for however many responses. More than the cache holds would be begun and thrown out again.
    card: its bytes; nothing is chosen where it is unknown, or where ``--vllm.engine_args`` says max_num_seqs.
    """
    given = engine_args(args)
    if args.device == "cpu" or not card or not args.vllm.num_engines or "max_num_seqs" in given:
        return []
    prompts = max(args.rollout.batch_size, args.rollout.vllm_generate_batch_size or 0)
    responses = math.ceil(prompts * args.rollout.n_samples_per_prompt / args.vllm.num_engines)
    estimates = estimate(args, shape)
    complete(estimates, args, shape, card)
    cache = next(part.bytes for one in estimates for part in one.parts if part.name == "KV cache")
    each = kv_bytes_per_token(shape, args.vllm.tensor_parallel_size) * args.data.max_len
    sampler = SAMPLED * shape.vocabulary  # of one place; the cache is what 128 of them leave
    held = (cache + AT_ONCE * sampler) // (each // LONGEST + sampler)
    places = min(responses, held, MOST) // 8 * 8
    if places <= AT_ONCE:
        return []
    args.vllm.engine_args = json.dumps(given | {"max_num_seqs": places})
    return [f"--vllm.engine_args max_num_seqs {places}: of an engine's {responses} responses of a rollout, sampled at a time (vLLM: {AT_ONCE})"]
