"""Trains a tiny quantized Qwen2 and Qwen3-MoE under real DeepSpeed ZeRO-1, 2 and 3 and saves what the tests check."""

from contextlib import nullcontext

import deepspeed
import torch
from qarl_openrlhf.patches import deepspeed as deepspeed_patch
from qarl_openrlhf.quant import QuantScheme, count_changed_codes
from qarl_openrlhf.quant.convert import convert_model, published_tensors, quantized_layers
from qarl_openrlhf.quant.ungathered import ungathered
from tests.tiny_models import tiny, tiny_moe
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

deepspeed_patch.apply()  # no g++ run for a shared-memory all-reduce
MODELS = {"dense": lambda: tiny("qwen2", tie_word_embeddings=True), "moe": tiny_moe}
SCHEME = QuantScheme.parse("w4a16:g32")


def config(stage: int, world: int, lr: float, accumulate: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "train_batch_size": 2 * accumulate * world,
        "bf16": {"enabled": True},
        # persistence threshold 0: really partition even these tiny parameters
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }


def build(kind: str, stage: int, ds_config: dict):
    source = MODELS[kind]()
    if stage < 3:
        return source
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16, attn_implementation="eager")
    if kind == "moe":  # as OpenRLHF does
        deepspeed.utils.set_z3_leaf_modules(model, [Qwen3MoeSparseMoeBlock])
    values = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(values[name].data)
    # zero.Init rounds the rotary frequencies to BF16, which the other stages do not; not what is tested here.
    model.model.rotary_emb.inv_freq = source.model.rotary_emb.inv_freq
    return model


def run_step(engine, batches) -> list[float]:
    losses = []
    for ids in batches:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.module.quant_cache.invalidate()
    return losses


def passes_without_gradients(engine, batches, held: bool) -> tuple[list[torch.Tensor], set[int], int]:
    """Logits of each batch, how many values of the quantized weights were there in the forwards, and how many stayed away."""
    network, there = engine.module, set()
    layers = quantized_layers(network).values()
    hooks = [
        layer.module.register_forward_hook(lambda module, *_, layer=layer: there.add(layer.weight.numel()))
        if hasattr(layer, "module")
        else layer.register_forward_hook(lambda module, *_: there.add(module.weight.numel()))
        for layer in layers
    ]
    with torch.no_grad(), ungathered(engine, network) if held else nullcontext(0) as away:
        logits = [engine(input_ids=ids, use_cache=False).logits.clone() for ids in batches]
    for hook in hooks:
        hook.remove()
    assert [name for name, _ in network.named_parameters()] == network.names_before
    return logits, there, away


def train(kind: str, stage: int, rank: int, world: int, reentrant: bool) -> dict:
    ds_config = config(stage, world, lr=1e-3, accumulate=2)
    model = build(kind, stage, ds_config)
    partitioned = sum(p.numel() == 0 for p in model.parameters())
    report = convert_model(model, SCHEME)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    engine.train()
    gather = deepspeed.zero.GatheredParameters if stage == 3 else None
    stats = model.quant_cache.stats
    publish = lambda: {n: t.clone() for n, t in published_tensors(model, SCHEME, gather=gather)}  # noqa: E731

    generator = torch.Generator().manual_seed(3)
    batches = torch.randint(3, 160, (2, world, 2, 12), generator=generator)[:, rank]
    out = {"report": [tuple(p[:3]) for p in report.layers], "partitioned": partitioned, "calls": []}
    before = publish()
    packed = lambda: {n: layer.packed() for n, layer in quantized_layers(model).items()}  # noqa: E731
    packed_before = packed()
    out["calls"].append(stats.quantize_calls)
    if stage == 3:
        model.names_before = [name for name, _ in model.named_parameters()]
        four = [*batches, *batches]  # DeepSpeed records an order in its second pass and fetches ahead by it from the third on
        out["without"] = {held: passes_without_gradients(engine, four, held) for held in (True, False)}
    out["losses"] = run_step(engine, batches)
    out["calls"].append(stats.quantize_calls)
    if stage == 3:  # nothing is packed now
        out["stale"] = passes_without_gradients(engine, batches[:1], True)[1:]
    after = publish()
    out["calls"].append(stats.quantize_calls)
    if stage == 3:  # a hit needs no gather, and the parameters are away
        layers = quantized_layers(model).values()
        out["gone"] = all(m.weight.numel() == 0 and m.is_packed() for m in layers)
    changed = [count_changed_codes(packed_before[n], p) for n, p in packed().items()]
    out["losses"] += run_step(engine, batches)
    out["calls"].append(stats.quantize_calls)
    out["changed"] = [sum(x) for x in zip(*changed, strict=True)]
    out["published_before"], out["published"] = before, after
    return out


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(64, 64, bias=False).bfloat16()})])
        self.layers[0]["up"].weight.data.mul_(0.2)

    def forward(self, x):
        return self.layers[0]["up"](x)


def thousand_small_updates(stage: int) -> dict:
    """AdamW under a constant gradient moves every weight by lr = 1e-6 a step, far below a BF16 weight's resolution."""
    model = OneLayer()
    convert_model(model, SCHEME)
    layer = model.layers[0]["up"]
    first_weight, first = layer.weight.detach().clone(), layer.packed()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, 1, 1e-6, 1))
    x = torch.randn(2, 64).bfloat16()
    for update in range(1000):
        engine.backward(engine(x).float().sum())
        engine.step()
        model.quant_cache.invalidate()
        if update == 0:
            one = count_changed_codes(first, layer.packed())
    gather = deepspeed.zero.GatheredParameters if stage == 3 else None
    dict(published_tensors(model, SCHEME, gather=gather))
    lost = (first_weight + 1e-6 * torch.ones_like(first_weight)) == first_weight
    return {"one": one[0], "thousand": layer.packed().changed_codes(first)[0], "lost_in_bf16": lost.float().mean().item()}


def main(rank: int, world: int, out_file: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    results = {
        kind: {f"zero{stage}": train(kind, stage, rank, world, reentrant=stage == 2 or world > 1) for stage in (1, 2, 3)}
        for kind in MODELS
    }
    if world == 1:
        results["small updates"] = thousand_small_updates(stage=2)
    torch.save(results, f"{out_file}.{rank}")

