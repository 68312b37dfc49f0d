"""The reference model's Ray actor as a plain object, in BF16 and in NF4: log-probs of the same tokens.

usage: python -m tests.actors.reference_worker MODEL OUT_FILE ZERO_STAGE
"""

import sys

import torch

from qarl_openrlhf import patches, runtime


def main() -> None:
    model, out, stage = sys.argv[1:]
    runtime.set_environment("cpu", threads=1)
    patches.apply()
    from qarl_openrlhf.actors.model_workers import ReferenceModelActor
    from qarl_openrlhf.actors.strategy import make_strategy
    from qarl_openrlhf.cli import train_qarl
    from tests.e2e.conftest import argv

    flags = {
        "device": "cpu", "actor.model_name_or_path": model, "data.prompt_dataset": "none.jsonl", "reward.remote_url": "none.py",
        "vllm.num_engines": 1, "actor.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1, "ds.zero_stage": stage,
        "algo.kl.init_coef": 0.01,
    }  # fmt: skip
    ids = torch.randint(3, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    results = {}
    for name, extra in (("bf16", {}), ("nf4", {"ref.load_in_4bit": True})):
        args, _, _ = train_qarl.resolve(argv(flags | extra))
        actor = ReferenceModelActor(1, 0, None, None)
        actor.init_model_from_pretrained(make_strategy(args), model)
        network = actor.model.model
        network = getattr(network, "module", network)
        results[name] = {
            "log_probs": actor.forward(ids, mask[:, 1:].bool(), mask).float(),
            "kinds": sorted({type(module).__name__ for module in network.modules() if "Linear" in type(module).__name__}),
            "bytes": sum(p.numel() * p.element_size() for name, p in network.named_parameters() if "_proj" in name),
            "trained": any(p.requires_grad and p.grad is not None for p in network.parameters()),
        }
    torch.save(results, out)


if __name__ == "__main__":
    main()
