"""Loads a tiny Qwen3-MoE checkpoint under ZeRO-3 with and without the patch; writes what each rank saw.
"""

import torch

from qarl_openrlhf import patches
from qarl_openrlhf.patches import zero3_loading


def load(directory: str) -> dict[str, torch.Tensor]:
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    keep = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    del keep
    parameters = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()} | dict(model.named_buffers())


def main(rank: int, world: int, out_file: str) -> None:
    patches.apply()
    import deepspeed

    deepspeed.init_distributed("gloo")
    directory = f"{out_file}.model"
    plain = load(directory)
    seen, shapes_only = [], zero3_loading.shapes_only

    def watched(model, state_dict):
        kept = shapes_only(model, state_dict)
        seen.append({tensor.device.type for tensor in kept.values()})
        return kept

    zero3_loading.shapes_only = watched
    zero3_loading.apply()
    zero3_loading.apply()
    patched = load(directory)
    torch.save({"plain": plain, "patched": patched, "seen": seen}, f"{out_file}.{rank}")

