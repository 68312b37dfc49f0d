"""Supervised next-token training of a small causal LM on (prompt, response) pairs, and how many problems it then solves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
import torch.nn.functional as F

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.rewards.reasoning_gym import score

WARMUP = 20  # steps of rising learning rate


def collate(pairs: list[tuple[str, str]], tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs -> (input_ids, labels), both int64 [B, T]: right-padded, labels -100 but for responses and their end token.

    Prompt and response are tokenized apart, as in a rollout; no mask is needed, for no real token sees padding on its right.
    """
    prompts = tokenizer([p for p, _ in pairs], add_special_tokens=False)["input_ids"]
    responses = tokenizer([r for _, r in pairs], add_special_tokens=False)["input_ids"]
    rows = [(p, [*r, tokenizer.eos_token_id]) for p, r in zip(prompts, responses)]
    length = max(len(p) + len(r) for p, r in rows)
    ids = torch.tensor([p + r + [tokenizer.pad_token_id] * (length - len(p) - len(r)) for p, r in rows])
    labels = torch.tensor([[-100] * len(p) + r + [-100] * (length - len(p) - len(r)) for p, r in rows])
    return ids, labels


def train(
    model,
    tokenizer,
    pairs: Iterator[tuple[str, str]],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    check: Callable[[], float],
    check_every: int,
    stop_at: float | None,
    show: Callable[[str], None],
    forms: Sequence[Callable[[], AbstractContextManager]] = (nullcontext,),
) -> list[dict]:
    """AdamW on FP32 parameters (products in BF16 on a GPU), learning rate constant after a short warm-up.

    forms: contexts in which the steps' forward passes are run in turn, e.g. through low-bit weights and in BF16.
    Every `check_every` steps `check()` gives the share of problems solved, and training ends where it reaches `stop_at`.
    Returns the curve, a list of {"step", "loss", "solved"}; DataError for a loss that is not finite.
    """
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    curve, losses, started = [], [], time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = (t.to(device) for t in collate(list(islice(pairs, batch_size)), tokenizer))
        with forms[step % len(forms)](), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits
        asked = labels[:, 1:] != -100  # the others' logits are most of the memory where the vocabulary is large
        loss = F.cross_entropy(logits[:, :-1][asked].float(), labels[:, 1:][asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % check_every == 0 or step == steps:
            mean_loss = torch.stack(losses).mean().item()
            if mean_loss != mean_loss:
                raise DataError(f"the loss is not finite by step {step}: give a smaller --lr than {lr}")
            curve.append({"step": step, "loss": round(mean_loss, 5), "solved": round(check(), 4)})
            show(f"step {step:>6}  loss {mean_loss:.4f}  solved {curve[-1]['solved']:.3f}  {time.monotonic() - started:.0f} s")
            losses = []
            if stop_at is not None and curve[-1]["solved"] >= stop_at:
                break
    return curve


@torch.no_grad()
def apart_in(forms: Iterable[Callable[[], AbstractContextManager]], model, tokenizer, pairs: list[tuple[str, str]]) -> float:
    """Mean |difference| of two forms' log-probs of the responses' tokens, in nats a token."""
    gaps = []
    for start in range(0, len(pairs), 64):
        ids, labels = (t.to(model.device) for t in collate(pairs[start : start + 64], tokenizer))
        asked = labels[:, 1:] != -100
        found = []
        for form in forms:
            with form(), torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1][asked]
            found.append(-F.cross_entropy(logits.float(), labels[:, 1:][asked], reduction="none"))
        one, other = found
        gaps.append((one - other).abs())
    return torch.cat(gaps).mean().item()


@torch.no_grad()
def solved(
    model, tokenizer, rows: list[dict], *, max_new_tokens: int, temperature: float, seed: int = 0, batch_size: int = 256
) -> float:
    """Share of `rows` (columns `input` and `label`) that earn the reward of `rewards/reasoning_gym.py`, one response each.

    temperature 0 is greedy; else the plain distribution at that temperature, sampled with `seed`.
    """
    was_training = model.training
    model.eval()
    sampling = {"do_sample": bool(temperature)}
    if temperature:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    right = 0.0
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.autocast(model.device.type, torch.bfloat16, enabled=bool(cuda)):
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            some = rows[start : start + batch_size]
            texts = [row["input"] for row in some]
            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            tokens = model.generate(
                input_ids=batch["input_ids"].to(model.device),
                attention_mask=batch["attention_mask"].to(model.device),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
            texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(score(row["input"] + text, row["input"], row["label"])[0] for row, text in zip(some, texts))
    model.train(was_training)
    return right / len(rows)
