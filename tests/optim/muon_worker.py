"""Takes two Muon steps on a tiny Qwen3-MoE built as OpenRLHF builds it, under ZeRO 1, 2 and 3, and on one process with torch.optim.
"""

import torch

from qarl_openrlhf import patches

STEPS, MICRO, LENGTH = 2, 2, 12
MUON = {"lr": 1e-3, "momentum": 0.9}
ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
MAX_NORM = 0.5
LOSS_SCALE = (1.0, 4.0)  # by step: without clipping the second gradient would count four times as much in the momentum


def model_directory(directory: str) -> str:
    """One dense and one MoE layer; float32 weights away from their initial values."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True, mlp_only_layers=[0],
        tie_word_embeddings=False, attention_bias=True, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def batches(world: int, accumulate: int) -> torch.Tensor:
    """[steps, accumulate, world, MICRO, LENGTH]"""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 160, (STEPS, accumulate, world, MICRO, LENGTH), generator=generator)


def deepspeed_run(directory: str, stage: int, world: int, rank: int, accumulate: int, scale: str) -> dict:
    import deepspeed
    from openrlhf.models import Actor

    from qarl_openrlhf.actors import asleep
    from qarl_openrlhf.actors.strategy import make_strategy
    from qarl_openrlhf.cli import train_qarl
    from tests.e2e.conftest import argv

    flags = {
        "device": "cpu",
        "actor.model_name_or_path": directory,
        "data.prompt_dataset": "none.jsonl",
        "reward.remote_url": "none.py",
        "vllm.num_engines": 1,
        "actor.num_gpus_per_node": world,
        "ref.num_gpus_per_node": 1,
        "ds.zero_stage": stage,
        "train.micro_batch_size": MICRO,
        "train.batch_size": MICRO * world * accumulate,
        "rollout.batch_size": MICRO * world * accumulate,
        "actor.optim": "muon",
        "actor.muon.lr": MUON["lr"],
        "actor.muon.momentum": MUON["momentum"],
        "actor.muon.scale": scale,
        "actor.adam.lr": ADAM["lr"],
        "actor.adam.eps": ADAM["eps"],
        "actor.adam.weight_decay": ADAM["weight_decay"],
        "quant.scheme": "bf16",
    }
    args, _, _ = train_qarl.resolve(argv(flags))
    strategy = make_strategy(args)
    original = strategy.get_ds_train_config

    def in_float32(*positional, **named):
        # OpenRLHF trains in BF16 or FP16; their rounding of gradients would be what is measured here.
        config = original(*positional, **named)
        config["bf16"]["enabled"] = False
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    strategy.get_ds_train_config = in_float32
    strategy.setup_distributed()
    actor = Actor(directory, attn_implementation="eager", ds_config=strategy.get_ds_train_config())
    cfg = dict(
        optim="muon", muon=vars(args.actor.muon), adam=vars(args.actor.adam), lr_scheduler="constant", lr_warmup_ratio=0.0,
        min_lr_ratio=0.1, max_norm=MAX_NORM, scheduler_steps=100,
    )  # fmt: skip
    actor, optimizer, scheduler = strategy.prepare((actor, cfg))
    engine = actor.model
    engine.train()
    muon = engine.basic_optimizer
    data = batches(world, accumulate)[:, :, rank]

    def take_step(step: int) -> None:
        for ids in data[step]:
            loss = engine(input_ids=ids, labels=ids).loss * LOSS_SCALE[step]
            strategy.backward(loss, actor, optimizer)
            strategy.optimizer_step(optimizer, actor, scheduler)

    def parameters() -> dict[str, torch.Tensor]:
        live = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(live.values()), enabled=stage == 3):
            return {name: p.detach().float().clone() for name, p in live.items()}

    start, counts, norms = parameters(), [], []
    for step in range(STEPS):
        if step == 1:
            engine.save_checkpoint(f"{directory}.checkpoint{stage}", tag="one")
        take_step(step)
        counts.append(muon.orthogonalized)
        norms.append(float(strategy.get_grad_norm(actor)))
    after = parameters()
    moments = [s for s in muon.state.values() if "momentum_buffer" in s]
    result = {"start": start, "after": after, "counts": counts, "norms": norms, "groups": len(muon.param_groups), "moments": len(moments)}
    engine.load_checkpoint(f"{directory}.checkpoint{stage}", tag="one")
    for _ in range(2):  # --ds.enable_sleep: what comes back is what went
        asleep.offload(engine)
        asleep.offload(engine)
        asleep.reload(engine)
    take_step(1)
    resumed = parameters()
    return result | {"resumed": all(torch.equal(after[name], p) for name, p in resumed.items())}


def reference_run(directory: str, world: int, accumulate: int, scale: str, clip: bool = True) -> dict:
    """torch.optim.Muon and AdamW on one process, every expert's gate, up and down a matrix of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.config.output_router_logits = True  # as OpenRLHF sets it: the load-balancing loss is part of the loss
    parameters = dict(model.named_parameters())
    matrices = {n: m for n, p in parameters.items() for m in [_unstacked(n, p)] if m}
    leaves = {n: [torch.nn.Parameter(m.clone()) for m in parts] for n, parts in matrices.items()}
    adjust = {"match_rms": "match_rms_adamw", "spectral": "original"}[scale]
    muon = torch.optim.Muon(
        [leaf for parts in leaves.values() for leaf in parts], **MUON, weight_decay=ADAM["weight_decay"], adjust_lr_fn=adjust
    )
    others = [n for n in parameters if n not in matrices]
    plain = [n for n in others if "norm" in n or n.endswith("bias")]
    adam = torch.optim.AdamW(
        [
            {"params": [parameters[n] for n in others if n not in plain]},
            {"params": [parameters[n] for n in plain], "weight_decay": 0.0},
        ],
        **ADAM,
    )
    norms = []
    for step, micro_batches in enumerate(batches(world, accumulate)):
        model.zero_grad()
        for ids in micro_batches.flatten(0, 1):
            (model(input_ids=ids, labels=ids).loss * LOSS_SCALE[step] / (world * accumulate)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if clip else 1e9)))
        for n, parts in leaves.items():
            for leaf, gradient in zip(parts, _unstacked(n, parameters[n].grad), strict=True):
                leaf.grad = gradient.clone()
        muon.step()
        adam.step()
        with torch.no_grad():
            for n, parts in leaves.items():
                for target, leaf in zip(_unstacked(n, parameters[n].data), parts, strict=True):
                    target.copy_(leaf)
    after = {n: p.detach().clone() for n, p in parameters.items()}
    return {"after": after, "norms": norms, "matrices": {n: len(parts) for n, parts in leaves.items()}, "adam": others}


def _unstacked(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views of the matrices in a parameter that Muon is for; none for other parameters."""
    if name.endswith("gate_up_proj"):
        return [half for expert in tensor for half in expert.chunk(2)]
    if name.endswith("experts.down_proj"):
        return list(tensor)
    return [tensor] if name.endswith("_proj.weight") else []


def main(rank: int, world: int, out_file: str) -> None:
    patches.apply()
    from openrlhf.utils import utils

    utils.convert_to_torch_dtype = lambda _: torch.float32
    directory = f"{out_file}.model"
    results = {}
    for accumulate, scale in ((1, "spectral"), (4, "match_rms")):
        for stage in (1, 2, 3):
            results[stage, accumulate] = deepspeed_run(directory, stage, world, rank, accumulate, scale)
        if rank == 0:
            results["reference", accumulate] = reference_run(directory, world, accumulate, scale)
            results["unclipped", accumulate] = reference_run(directory, world, accumulate, scale, clip=False)
    torch.save(results, f"{out_file}.{rank}")

