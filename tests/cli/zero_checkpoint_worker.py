"""Trains a model for one step under ZeRO 1, 2 and 3 and saves as OpenRLHF does: zero_checkpoint_worker.py MODEL OUT PORT RANK WORLD.

OUT/zeroN/_actor/global_step1/...: DeepSpeed's files; OUT/zeroN.pt: {name: BF16 parameter} of the learner at that moment.
"""

import os
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from qarl_openrlhf.patches import deepspeed as deepspeed_patch

deepspeed_patch.apply()


def main() -> None:
    directory, out, port, rank, world = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 2 * int(world),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        }
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        ids = torch.arange(5, 37).reshape(2, 16) + int(rank)
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        engine.save_checkpoint(f"{out}/zero{stage}/_actor", tag="global_step1")
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        if rank == "0":
            torch.save(parameters, f"{out}/zero{stage}.pt")


if __name__ == "__main__":
    main()
