"""Log-probs of tokens from a chunk's logits, and their gradient: our kernels beside PyTorch's operations."""

from collections.abc import Iterator

import torch

from qarl_openrlhf.bench.timing import copy_gb_s, peak_mib, times_us
from qarl_openrlhf.kernels import dispatch, reference

VOCABULARY = 151936  # of every model in bench.shapes


def run(models: list[str]) -> Iterator[dict]:
    """One row a chunk size (``--actor.logprob_chunk``), with and without the entropy. models is not read."""
    copy = copy_gb_s()
    for chunk in (512, 2048, 8192):
        logits = torch.randn(chunk, VOCABULARY, device="cuda").bfloat16()
        targets = torch.randint(0, VOCABULARY, (chunk,), device="cuda")
        for entropy in (False, True):
            values, lse = dispatch.token_log_probs(logits, targets, 1.0, entropy)
            grad = torch.randn_like(values)
            jobs = {}
            for name, made in (("ours", dispatch), ("torch", reference)):
                jobs[f"forward {name}"] = lambda made=made: made.token_log_probs(logits, targets, 1.0, entropy)
                # Ours overwrites the logits: what it reads next is of another size, not of another number of bytes.
                jobs[f"backward {name}"] = lambda made=made: made.token_log_probs_backward(
                    logits, targets, values, lse, grad, 1.0
                )
            us = times_us(jobs, repeats=9)
            row = {"tokens": chunk, "vocabulary": VOCABULARY, "entropy": entropy, "copy GB/s": copy}
            row |= {f"{name} us": value for name, value in us.items()}
            row |= {f"{name} ours / torch": us[f"{name} ours"] / us[f"{name} torch"] for name in ("forward", "backward")}
            size = logits.numel() * logits.element_size()
            row |= {"forward GB/s": size / us["forward ours"] / 1e3, "backward GB/s": 2 * size / us["backward ours"] / 1e3}
            yield row | {f"{name} peak MiB": peak_mib(job) for name, job in jobs.items()}
            del jobs
