"""One rank of ZeRO-3 on layers whose shards end in the middle of a group of weights; saves what is published."""

import deepspeed
import torch
from qarl_openrlhf.patches import deepspeed as deepspeed_patch
from qarl_openrlhf.quant import QuantScheme
from qarl_openrlhf.quant.convert import convert_model, published_tensors
from torch import nn

deepspeed_patch.apply()
SHAPES = {"up": (33, 96), "down": (35, 96)}  # 33 x 48 weights a rank of two: one and a half groups of 32 past a row's end


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        linears = {name: nn.Linear(columns, rows, bias=False).bfloat16() for name, (rows, columns) in SHAPES.items()}
        self.layers = nn.ModuleList([nn.ModuleDict(linears)])

    def forward(self, x):
        return self.layers[0]["up"](x).float().square().sum() + self.layers[0]["down"](x).float().square().sum()


def run(text: str, world: int, rank: int) -> dict:
    scheme = QuantScheme.parse(text)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}},
    }
    model = Layers()
    convert_model(model, scheme)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    shards = {name: parameter.ds_tensor.numel() for name, parameter in model.named_parameters()}
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
        model.quant_cache.invalidate()
    published = dict(published_tensors(model, scheme, gather=deepspeed.zero.GatheredParameters))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"shards": shards, "published": published, "weights": whole}


def main(rank: int, world: int, out: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.save({text: run(text, world, rank) for text in ("w4a16:g32", "w8a8")}, f"{out}.{rank}")

