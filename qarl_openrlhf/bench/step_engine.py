"""The engine's half of a step: a real vLLM engine with published weights, its rollouts, and pushes into it."""

import statistics
import time

import ray
import torch

from qarl_openrlhf.bench import sync
from qarl_openrlhf.bench.step_workload import Workload


class EnginePair:
    """An engine of a scheme and the learner's end of the push, on one GPU (ipc), two (nccl) or a CPU (gloo).

    kv_bytes: memory of the KV cache; None on a CPU. The engine is the training run's own, with dummy weights and a first
    publish. CUDA graphs are of decoding only, nothing is compiled: all schemes alike.
    """

    def __init__(
        self,
        directory: str,
        shape: str,
        layers: int | None,
        scheme: str,
        workload: Workload,
        *,
        device: str,
        transport: str,
        tp: int = 1,
        kv_bytes: int | None = None,
        bucket_mb: int = 512,
    ):
        self.workload = workload
        sequences = workload.sequences
        options: dict = {"max_model_len": workload.prompt + workload.response, "max_num_seqs": sequences}
        if device == "cuda":
            options |= {"kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": 0.2}
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": graph_sizes(sequences),
            }
        alone = transport == "nccl"
        share = 1 if alone else 0.5
        logical = 0 if device == "cpu" else share
        self.engine = sync.start_engine(
            directory, scheme, gpus=logical * (tp if alone else 1), tp=tp, device=device, **options
        )
        worker = ray.remote(sync.Learner).options(num_gpus=logical, num_cpus=0)
        self.learner = worker.remote(shape, layers, scheme, device=device, repeated=True)
        try:
            connected = self.learner.connect.remote([self.engine], transport, bucket_mb, "checksum")
            ray.get([self.engine.weights_state.remote(), connected])
            self.first = ray.get(self.learner.push.remote())
        except BaseException:
            self.close()
            raise

    def push(self, pushes: int) -> dict:
        """Medians over ``pushes`` publishes, quantizing and verification included, after the first, which connects."""
        runs = [ray.get(self.learner.push.remote()) for _ in range(pushes)]
        quantize = statistics.median(ray.get(self.learner.quantize_only.remote()) for _ in range(3))
        names = ("total_ms", "sync/send_ms", "sync/load_ms", "sync/verify_ms", "sync/finish_ms")
        return {
            **{name.removeprefix("sync/"): statistics.median(run[name] for run in runs) for name in names},
            "all_ms": [run["total_ms"] for run in runs],
            "first_ms": self.first["total_ms"],
            "quantize_only_ms": quantize,
            "bytes": runs[-1]["sync/bytes"],
            "checksum_ok": min(run["sync/checksum_ok"] for run in runs),
        }

    def rollout(self, kind: str, timeout_s: float = 580) -> dict:
        """Sample every response to its planned length: one request a response, all sent at once, log-probs returned.

        {seconds, tokens (sampled), tok_per_s, longest}.
        """
        lengths = self.workload.lengths(kind)
        prompts = [_prompt(i // self.workload.samples, self.workload.prompt) for i in range(len(lengths))]
        self._sample(prompts[:2], [8, 8], timeout_s)  # the first requests of an engine compile a few kernels
        started = time.perf_counter()
        sampled = self._sample(prompts, lengths, timeout_s)
        seconds = time.perf_counter() - started
        if sampled != lengths:
            raise RuntimeError(f"the engine sampled {sum(sampled)} tokens, not the {sum(lengths)} asked of it")
        tokens = sum(lengths)
        return {"seconds": seconds, "tokens": tokens, "tok_per_s": tokens / seconds, "longest": max(lengths)}

    def _sample(self, prompts: list[list[int]], lengths: list[int], timeout_s: float) -> list[int]:
        from vllm import SamplingParams

        calls = []
        for ids, n in zip(prompts, lengths, strict=True):
            params = SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
            calls.append(self.engine.generate.remote(ids, params))
        return [len(output.outputs[0].token_ids) for output in ray.get(calls, timeout=timeout_s)]

    def kernels(self) -> dict:
        """Layer type -> kernel that vLLM chose."""
        return ray.get(self.engine.kernels.remote())

    def close(self) -> None:
        ray.kill(self.learner)
        ray.kill(self.engine)
        if torch.cuda.is_available():
            time.sleep(3)  # the GPU's memory comes back after the processes have ended


def graph_sizes(sequences: int) -> list[int]:
    """Batch sizes with a CUDA graph: of the long tail of a rollout, then in 16 steps up to all at once."""
    step = max(16, -(-sequences // 256) * 16)
    sizes = {n for n in (1, 2, 4, 8) if n < sequences} | set(range(step, sequences, step)) | {sequences}
    return sorted(sizes)


def _prompt(index: int, length: int) -> list[int]:
    """Token ids that differ between prompts and fit every vocabulary of ``sync.SHAPES``."""
    return [100 + (7 * index + 13 * i) % 3000 for i in range(length)]
