"""``--vllm.engine_args``: any of vLLM's own engine arguments, but for those that this system sets itself."""

import argparse
import difflib
import json
from types import UnionType
from typing import Union, get_args, get_origin

# What decides which weights an engine has, or has a flag of its own: name -> what to use.
OWNED = {
    "model": "--actor.model_name_or_path",
    "seed": "--train.seed",
    "max_model_len": "--data.max_len",
    "tensor_parallel_size": "--vllm.tensor_parallel_size",
    "gpu_memory_utilization": "--vllm.gpu_memory_utilization",
    "enforce_eager": "--vllm.enforce_eager",
    "enable_prefix_caching": "--vllm.enable_prefix_caching",
    "enable_sleep_mode": "--vllm.enable_sleep",
    "quantization": "--quant.scheme",
    "dtype": "nothing: engines compute in BF16, as the learner does",
    "load_format": "nothing: engines start with dummy weights and get the learner's",
    "hf_overrides": "--model.max_positions or --model.rope_theta",
    "weight_transfer_config": "the --sync flags",
    "worker_extension_cls": "nothing: the weight sync needs its own",
    "logprobs_mode": "nothing: log-probs of the distribution that is sampled from",
    "distributed_executor_backend": "--vllm.tensor_parallel_size",
    "pipeline_parallel_size": "--vllm.tensor_parallel_size",
    "data_parallel_size": "--vllm.num_engines",
    "generation_config": "the --rollout flags",
    "override_generation_config": "the --rollout flags",
    "enable_lora": "nothing: QaRL trains the full weights",
    "kv_cache_dtype": "nothing: the learner's keys and values are BF16",
    "skip_tokenizer_init": "nothing: responses are decoded for their reward",
    "model_weights": "--actor.model_name_or_path",
    "quantization_config": "--quant.scheme",
} | {
    name: "nothing: a draft model would not get the learner's weights" for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens")
} | {
    name: "nothing: a push writes expert 3 to place 3, and vLLM would have another expert there; enable_expert_parallel alone splits them in order"
    for name in ("enable_eplb", "eplb_config", "expert_placement_strategy", "enable_elastic_ep")
} | {
    name: "--actor.model_name_or_path"
    for name in ("tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision", "hf_config_path", "config_format", "model_impl")
}
PLAIN = (int, float, bool, str, type(None))


def checked(text: str) -> str:
    """The text of a JSON object, e.g. '{"max_num_seqs": 512}'; ArgumentTypeError for anything else.

    The flag's value stays text: OpenRLHF makes a namespace of a dict.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}); e.g. '{{\"max_num_seqs\": 512}}'") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed, e.g. '{\"max_num_seqs\": 512}'")
    return text


def _no_number(text: str):
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple]) -> dict:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is given twice")
    return dict(pairs)


def engine_args(args) -> dict:
    """The flag's value of nested arguments."""
    return json.loads(args.vllm.engine_args)


def chosen(args) -> dict:
    """Engine arguments of a run: those that its other flags ask for, and the flag's own, which win."""
    ours = {}
    if args.train.partial_rollout_enable:
        # A publish's probe comes while thousands of responses may be waiting for their turn; first come, first served would have it,
        # and with it the learner, wait until all of them have begun.
        ours["scheduling_policy"] = "priority"
    return ours | engine_args(args)


def problem(given: dict) -> str | None:
    """What is wrong with them, naming the argument and what would work; None if nothing is."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name: field.type for field in fields(AsyncEngineArgs)}
    for name, value in given.items():
        if name in OWNED:
            return f"--vllm.engine_args: {name} is not to be set there; use {OWNED[name]}"
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"--vllm.engine_args: vLLM has no engine argument {name}{hint}"
        wanted = _plain_kinds(known[name])
        if wanted and not any(type(value) is kind or (kind is float and type(value) is int) for kind in wanted):
            kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
            return f"--vllm.engine_args: {name} is {json.dumps(value)}; vLLM takes {kinds} there"
        if isinstance(value, (int, float)) and name.startswith("max_") and value < 1:
            return f"--vllm.engine_args: {name} is {value}; at least 1 is needed"
        if name.endswith("_bytes") and isinstance(value, int) and value < 1:
            return f"--vllm.engine_args: {name} is {value}; at least 1 is needed"
    return None


def _plain_kinds(annotation) -> list[type]:
    """The types of a field that takes plain values only (int | None), else none: vLLM itself looks at the rest."""
    if annotation in PLAIN:
        return [annotation]
    members = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else []
    return members if members and all(kind in PLAIN for kind in members) else []
