"""Does an engine over an exported directory compute what the learner computes? Log-probs of the same tokens, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qarl_openrlhf.quant.linear import quantized_forward

LENGTH = 128  # tokens a text, cut to the model's positions
TEXTS = 4
# Two BF16 implementations of one small model differ by 0.04 nats a token on average, a 4-bit model against its BF16 original by
# 0.9: between those.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Comparison:
    """Over all tokens: mean and largest |log-prob of the engine - the learner's|, in nats."""

    tokens: int
    mean: float
    largest: float

    def __str__(self) -> str:
        return f"{self.tokens} tokens, |difference of log-probs| {self.mean:.2e} on average, {self.largest:.2e} at most"


def probe_ids(vocabulary: int, length: int, *, seed: int = 0) -> list[list[int]]:
    """TEXTS lists of token ids that the model itself continues: see `learner_text`. The first tokens, drawn evenly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (TEXTS, min(4, length)), generator=generator).tolist()


@torch.no_grad()
def learner_text(model: nn.Module, length: int) -> Tensor:
    """int64 [TEXTS, length] sampled from the quantized learner at temperature 1: tokens of the kind a rollout has."""
    ids = torch.tensor(probe_ids(model.config.get_text_config().vocab_size, length), device=model.device)
    torch.manual_seed(0)
    with quantized_forward(model):
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            min_new_tokens=length - ids.shape[1], max_new_tokens=length - ids.shape[1], pad_token_id=0,
        )  # fmt: skip


@torch.no_grad()
def learner_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """float32 [B, L - 1] of ids [B, L], by the learner's quantized forward."""
    with quantized_forward(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0].cpu()


def engine_log_probs(llm, ids: Tensor) -> Tensor:
    """The same of a `vllm.LLM`."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    rows = ids.tolist()
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    return torch.tensor(
        [[step[t].logprob for step, t in zip(o.prompt_logprobs[1:], row[1:], strict=True)] for o, row in zip(outputs, rows, strict=True)]
    )


def compare(engine: Tensor, learner: Tensor) -> Comparison:
    difference = (engine - learner).abs()
    return Comparison(difference.numel(), difference.mean().item(), difference.max().item())
