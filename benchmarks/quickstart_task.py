"""Which task can the quickstart learn? Solve rate and mixed groups of the *quantized* start policy on candidate tasks.

    python benchmarks/quickstart_task.py MODEL_DIR --tasks sums sums_minus --schemes w4a16:g64 w4a16:g32 bf16 --out FILE.json

GRPO learns from groups whose responses differ in reward: a task is fit when the start policy, with its low-bit weights,
solves 15 to 40 % and at least 40 % of the groups are mixed. MODEL_DIR is what `python -m qarl_openrlhf.data.smollm2` writes.

Sampling is plain transformers in float32 on the exact low-bit weights (no vLLM), which stands for the engine's BF16 well
enough for rates of this size. Standard errors of the solve rate are over prompts, whose samples are not independent.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from qarl_openrlhf.data.reasoning_gym import prompt_rows
from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.quant import QuantScheme, dequantize_weight, quantize_weight
from qarl_openrlhf.rewards.reasoning_gym import score

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# name -> arguments of prompt_rows
TASKS = {
    "sums": {"task": "chain_sum", "config": ONE_DIGIT, "exclude": " - "},
    "sums_minus": {"task": "chain_sum", "config": ONE_DIGIT},
    "sums_3_terms": {"task": "chain_sum", "config": {**ONE_DIGIT, "min_terms": 3, "max_terms": 3}, "exclude": " - "},
    "sums_2_digits": {"task": "chain_sum", "config": {**ONE_DIGIT, "min_digits": 2, "max_digits": 2}, "exclude": " - "},
    "products": {"task": "products", "config": ONE_DIGIT},
}


def load_policy(model_dir: str, scheme: QuantScheme):
    """float32 model whose decoder linears hold the effective low-bit weights of `scheme`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    if scheme.quantized:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                module.weight.data = dequantize_weight(quantize_weight(module.weight.data, scheme, name=name))
    return model.float().eval()


@torch.no_grad()
def sample(model, ids_BT: torch.Tensor, group: int, temperature: float, max_new_tokens: int, stop: torch.Tensor) -> list[list[int]]:
    """`group` responses for each row of `ids_BT` (int64, no padding), up to and with the first token whose `stop` [V] is True."""
    out = model(input_ids=ids_BT, past_key_values=DynamicCache(), logits_to_keep=1)
    cache, logits_BV = out.past_key_values, out.logits[:, -1].repeat_interleave(group, 0)
    cache.batch_repeat_interleave(group)
    tokens, alive = [], torch.ones(len(logits_BV), dtype=torch.bool)
    responses: list[list[int]] = [[] for _ in range(len(logits_BV))]
    for step in range(max_new_tokens):
        next_B = torch.multinomial(torch.softmax(logits_BV / temperature, -1), 1)[:, 0]
        for row in alive.nonzero()[:, 0].tolist():
            responses[row].append(int(next_B[row]))
        alive &= ~stop[next_B]
        if not alive.any() or step + 1 == max_new_tokens:
            break
        out = model(input_ids=next_B[:, None], past_key_values=cache)
        logits_BV = out.logits[:, -1]
    return responses


def measure(model, tokenizer, rows: list[dict], args) -> dict:
    """Rates of one policy on one prompt set; see the module docstring."""
    vocabulary = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    stop = torch.tensor(["\n" in text for text in vocabulary])
    stop[tokenizer.eos_token_id] = True
    by_length = defaultdict(list)
    for row in rows:
        ids = tokenizer(row["input"], add_special_tokens=False).input_ids
        by_length[len(ids)].append((ids, row))
    torch.manual_seed(args.seed)
    rewards, lengths, unfinished, texts, prompt_tokens = [], [], 0, [], []
    for length, items in sorted(by_length.items()):
        for begin in range(0, len(items), 32):
            part = items[begin : begin + 32]
            ids = torch.tensor([i for i, _ in part])
            responses = sample(model, ids, args.group, args.temperature, args.max_new_tokens, stop)
            prompt_tokens += [length] * len(part)
            for index, (_, row) in enumerate(part):
                mine = responses[index * args.group : (index + 1) * args.group]
                decoded = [tokenizer.decode(r) for r in mine]
                rewards.append([score(row["input"] + text, row["input"], row["label"])[0] for text in decoded])
                lengths += [len(r) for r in mine]
                unfinished += sum(not bool(stop[r[-1]]) for r in mine)
                texts.append([row["input"].rsplit("\n", 1)[-1], decoded])
    n = len(rewards)
    means = torch.tensor(rewards).mean(1)
    mixed = ((means > 0) & (means < 1)).float().mean().item()
    return {
        "prompts": n,
        "different_prompts": len({row["input"] for row in rows}),
        "solve_rate": means.mean().item(),
        "solve_rate_se": (means.std() / math.sqrt(n)).item(),
        "mixed_groups": mixed,
        "mixed_groups_se": math.sqrt(mixed * (1 - mixed) / n),
        "all_wrong_groups": (means == 0).float().mean().item(),
        "response_tokens": sum(lengths) / len(lengths),
        "unfinished": unfinished / len(lengths),
        "prompt_tokens": sum(prompt_tokens) / n,
        "samples": texts[:8],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--schemes", nargs="+", default=["w4a16:g64", "w4a16:g32", "bf16"])
    parser.add_argument("--shots", type=int, nargs="+", default=[4])
    parser.add_argument("--shot_seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max_new_tokens", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
    results = []
    for scheme in args.schemes:
        model = load_policy(args.model_dir, QuantScheme.parse(scheme))
        for task in args.tasks:
            for shots in args.shots:
                for shot_seed in args.shot_seeds:
                    started = time.time()
                    rows = prompt_rows(
                        n=args.prompts, seed=args.seed, style="equation", shots=shots, shot_seed=shot_seed, **TASKS[task]
                    )
                    result = {"scheme": scheme, "task": task, "shots": shots, "shot_seed": shot_seed}
                    result |= measure(model, tokenizer, rows, args) | {"first_prompt": rows[0]["input"]}
                    result["seconds"] = round(time.time() - started, 1)
                    results.append(result)
                    print(
                        f"{scheme:10s} {task:14s} shots {shots} seed {shot_seed}  solved {result['solve_rate']:.3f} ± "
                        f"{result['solve_rate_se']:.3f}  mixed {result['mixed_groups']:.2f}  response {result['response_tokens']:.1f} "
                        f"tokens ({result['unfinished']:.0%} unfinished)  prompt {result['prompt_tokens']:.0f}  {result['seconds']} s",
                        flush=True,
                    )
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(args.out) as part:
        part.write_text(json.dumps({"arguments": vars(args) | {"model_dir": "SmolLM2-135M-Instruct"}, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
