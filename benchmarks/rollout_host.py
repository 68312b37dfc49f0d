"""What a sampled token costs the engine's own process on the host: as vLLM is asked by default, and as our engines ask it.

    python benchmarks/rollout_host.py [--requests 256] [--tokens 128] [--out benchmarks/results/rollout_host_cpu.json]

That process (AsyncLLM, in a Ray actor) takes every token from the core's process, keeps its log-prob and makes text of it. With
hundreds of sequences it, and not the GPU, can be what a decode step waits for. A random Qwen3 of 2 layers on a CPU: only the
processor time of the process itself is counted, not the model's, which is in another process.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from qarl_openrlhf import runtime
from qarl_openrlhf.cli.bench_sync import versions

# The settings of engine/actor.py, one after the other.
STEPS = {
    "vLLM's defaults": {},
    "outputs only when finished": {"final": True},
    "and text made once": {"final": True, "detokenize": False},
    "and log-probs as numbers": {"final": True, "detokenize": False, "flat_logprobs": True},
}


def save_model(directory: str) -> None:
    from qarl_openrlhf.data.byte_tokenizer import byte_tokenizer
    from qarl_openrlhf.data.small_qwen3 import Settings, build_model

    tokenizer = byte_tokenizer()
    build_model(Settings(layers=2), tokenizer).bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


async def measure(directory: str, requests: int, tokens: int, statistics: bool) -> dict[str, float]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from qarl_openrlhf.engine.config import ONE_PROCESS
    from qarl_openrlhf.engine.response_text import response_text

    options = dict(max_num_seqs=requests, max_model_len=tokens + 16, enforce_eager=True, distributed_executor_backend=ONE_PROCESS)
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=directory, dtype="bfloat16", disable_log_stats=not statistics, **options)
    )

    async def one(i: int, final: bool = False, detokenize: bool = True, flat_logprobs: bool = False) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=detokenize, flat_logprobs=flat_logprobs)
        params.output_kind = RequestOutputKind.FINAL_ONLY if final else RequestOutputKind.CUMULATIVE
        prompt = [5 + i % 200, 6, 7]
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=f"{i} {time.monotonic()}"):
            last = output.outputs[0]
        if not detokenize:
            response_text(llm.get_tokenizer(), prompt, last, params)

    found = {}
    for name, settings in STEPS.items():
        times = []
        for _ in range(3):
            began = time.process_time()
            await asyncio.gather(*[one(i, **settings) for i in range(requests)])
            times.append((time.process_time() - began) / requests / tokens * 1e6)
        found[name] = round(min(times), 1)
        print(f"{found[name]:8.1f} us a token: {name}{'' if statistics else ', without statistics'}", flush=True)
    llm.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", default="benchmarks/results/rollout_host_cpu.json")
    args = parser.parse_args()
    runtime.set_environment("cpu")
    directory = tempfile.mkdtemp()
    save_model(directory)
    record = {
        "command": f"python benchmarks/rollout_host.py --requests {args.requests} --tokens {args.tokens}",
        "versions": versions("torch", "vllm", "transformers"),
        "us of processor time a token": {
            "with vLLM's statistics": asyncio.run(measure(directory, args.requests, args.tokens, statistics=True)),
            "without (as our engines)": asyncio.run(measure(directory, args.requests, args.tokens, statistics=False)),
        },
    }
    Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
