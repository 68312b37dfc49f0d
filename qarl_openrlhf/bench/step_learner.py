"""The learner's half of a step: replay buffer, DeepSpeed, ``QuantActor`` and ``QarlActorTrainer`` on made-up responses."""

import gc
import io
import os
import time
from contextlib import redirect_stdout

import torch

from qarl_openrlhf import patches
from qarl_openrlhf.bench import step_clock
from qarl_openrlhf.bench.step_profile import profiled
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.runtime import free_port

UPDATES = 2  # optimizer steps of one measured rollout


def recipe_flags(workload: Workload, *, tokens: int, samples: int, world: int) -> dict[str, object]:
    """Flags of the recipes (scripts/lib/recipe.sh) for ``UPDATES`` optimizer steps of ``samples`` responses a GPU.

    samples must be even: they come two to a prompt here, since ``group_norm`` wants a group; nothing is computed from it.
    """
    return {
        "rollout.batch_size": samples * UPDATES * world // 2,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": samples * world,
        "train.micro_batch_size": 1,
        "rollout.micro_batch_size": 1,
        "data.max_len": workload.prompt + workload.response,
        "rollout.max_new_tokens": workload.response,
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": tokens,
        "rollout.max_tokens_per_gpu": tokens,
        "actor.optim": "muon",
        "actor.muon.lr": 1e-6,
        "actor.adam.lr": 1e-6,
        "actor.adam.weight_decay": 0.01,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0,
        "actor.max_norm": 1.0,
        "actor.gradient_checkpointing_enable": True,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ds.zero_stage": 2,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": world,
        "ref.num_gpus_per_node": world,
        "vllm.num_engines": 1,
        "preset": "tbpo",
        "data.prompt_dataset": "none.jsonl",
        "reward.remote_url": "none.py",
    }


def resolve(directory: str, scheme: str, device: str, flags: dict[str, object], extra: list[str]):
    """Checked arguments of ``train_qarl`` for the model in ``directory``; ``extra`` are the user's own flags and win.

    device "cuda" on a machine without: arguments for a plan, of the scheme although only a GPU runs it.
    """
    from qarl_openrlhf.cli import train_qarl

    words = ["--device", device, "--actor.model_name_or_path", directory, "--quant.scheme", scheme]
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if device == "cuda" and not torch.cuda.is_available():
        words += ["--dry_run", "--dry_run_gpu_gb", "80"]
    with redirect_stdout(io.StringIO()):  # OpenRLHF's advice to install flash-attn
        return train_qarl.resolve(words + extra)[0]


def samples_for(workload: Workload, tokens: int) -> int:
    """Responses an optimizer step that fill about two micro-batches of ``tokens``; even, at least 2."""
    return max(2, 2 * tokens // (workload.prompt + workload.response) // 2 * 2)


def one_rank_environment() -> None:
    """A world of one, unless a launcher (torchrun) has made a larger one."""
    if "RANK" in os.environ:
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def initialize(model) -> None:
    """The model's own random weights under ZeRO-3, whose parameters are in shards when transformers would set them.

    Without, a router is all zeros, so that every token goes to the same experts, and these are what was in the memory before.
    """
    import deepspeed

    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                for parameter in own:
                    parameter._is_hf_initialized = False
                if torch.distributed.get_rank() == 0:
                    model._init_weights(module)


class StepLearner:
    """A trainer on random weights of a config, as the Ray actor of a run builds it (without an engine to publish to)."""

    def __init__(self, args, config, device: str):
        patches.apply()
        from qarl_openrlhf.actors.cores import use_cores
        from qarl_openrlhf.actors.learner import QarlActorTrainer
        from qarl_openrlhf.actors.strategy import make_strategy

        self.args = args
        if device == "cuda":  # an optimizer in main memory gets the cores that a run gives it
            use_cores(args, args.actor)
        strategy = make_strategy(args)
        strategy.setup_distributed()
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        actor = self._actor(strategy, config)
        settings = dict(
            optim=args.actor.optim,
            muon=vars(args.actor.muon),
            adam=vars(args.actor.adam),
            lr_scheduler=args.actor.lr_scheduler,
            lr_warmup_ratio=args.actor.lr_warmup_ratio,
            min_lr_ratio=args.actor.min_lr_ratio,
            max_norm=args.actor.max_norm,
            scheduler_steps=1000,
        )
        actor, optimizer, scheduler = strategy.prepare((actor, settings))
        self.trainer = QarlActorTrainer(
            strategy, actor, None, optimizer, scheduler, micro_train_batch_size=args.train.micro_batch_size, vllm_engines=None
        )
        self.clock = step_clock.PhaseClock(self.device)
        step_clock.attach(self.clock, self.trainer)

    def _actor(self, strategy, config):
        """``Actor`` around a model made on the device: nothing is read from a disk."""
        import deepspeed
        from openrlhf.models import Actor
        from openrlhf.models.utils import set_z3_leaf_modules

        if self.args.ds.use_liger_kernel:  # as Actor does, which is given the model here
            from liger_kernel.transformers import AutoLigerKernelForCausalLM as AutoModelForCausalLM

            from qarl_openrlhf.patches import liger

            liger.keep_experts(self.args)
        else:
            from transformers import AutoModelForCausalLM
        torch.manual_seed(0)
        kwargs = dict(attn_implementation=self.args.ds.attn_implementation, dtype=torch.bfloat16)
        if self.args.ds.zero_stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=strategy.get_ds_train_config(), remote_device=None):
                model = AutoModelForCausalLM.from_config(config, **kwargs)
            initialize(model)
        else:
            with self.device:
                model = AutoModelForCausalLM.from_config(config, **kwargs)
        if hasattr(model.config, "output_router_logits"):
            model.config.output_router_logits = True
        set_z3_leaf_modules(model, detect_hybrid=False)
        model.config.use_cache = False
        actor = Actor(model, temperature=self.args.rollout.temperature)
        actor.packing_samples, actor.is_vlm = self.args.ds.packing_samples, False
        if self.args.actor.gradient_checkpointing_enable:
            actor.gradient_checkpointing_enable({"use_reentrant": self.args.actor.gradient_checkpointing_reentrant})
        return actor

    def rollout(self, prompt: int, lengths: list[int], rank: int) -> list:
        """An ``Experience`` a response, with a sampler's log-probs that are near a random model's."""
        from openrlhf.trainer.ppo_utils.experience import Experience

        vocabulary = self.trainer.actor.network.config.vocab_size
        generator = torch.Generator().manual_seed(rank)
        made = []
        for i, response in enumerate(lengths):
            length = prompt + response
            action_mask = torch.zeros(1, length - 1, dtype=torch.long)
            action_mask[0, prompt - 1 :] = 1
            noise = torch.randn(1, length - 1, generator=generator)
            made.append(
                Experience(
                    sequences=torch.randint(4, vocabulary - 4, (1, length), generator=generator),
                    attention_mask=torch.ones(1, length, dtype=torch.long),
                    action_mask=action_mask,
                    rollout_log_probs=-torch.log(torch.tensor(float(vocabulary))) + 0.1 * noise,
                    advantages=torch.full((1, length - 1), 1.0 if i % 2 else -1.0),
                    rewards=torch.tensor([float(i % 2)]),
                    total_length=torch.tensor([float(length)]),
                    response_length=torch.tensor([response]),
                    truncated=torch.tensor([False]),
                    prompts=["p"],
                    labels=["l"],
                    info={"reward": torch.tensor([float(i % 2)])},
                )
            )
        return made

    def measure(self, prompt: int, lengths: list[int], repeats: int = 2, *, profile: bool = False) -> dict:
        """Train on a rollout of these responses, once to warm up and ``repeats`` times measured.

        Returns {tokens, micro_batches, updates, runs: [{phase: seconds}], peak_gib, kernels}. Each run begins as a step does:
        with the weights of the last publish quantized. profile: one more run, whose kernels are in "profile".
        """
        runs: list[dict] = []
        buffer = self.trainer.replay_buffer
        for repeat in range(repeats + 1):
            self._fill(prompt, lengths)
            self.clock.reset()
            started = time.perf_counter()
            metrics = self.trainer.ppo_train(0.0)
            wall = time.perf_counter() - started
            if repeat:
                runs.append({phase: self.clock.seconds[phase] for phase in step_clock.PHASES} | {"wall": wall})
        more = {}
        if profile:
            self._fill(prompt, lengths)
            more["profile"] = profiled(lambda: self.trainer.ppo_train(0.0), self.device)
        return {
            **more,
            "tokens": sum(prompt + n for n in lengths),
            "micro_batches": len(buffer),
            "updates": UPDATES,
            "runs": runs,
            "peak_gib": metrics.get("memory/learner_peak_gib"),  # of the last measured run and the quantizing before it
            "kernel_calls": {name: value for name, value in metrics.items() if name.startswith("kernels/") and "calls" in name},
            "in_band_before_update": metrics.get("objective/in_band_frac_by_update/0"),
        }

    def _fill(self, prompt: int, lengths: list[int]) -> None:
        """A rollout in the buffer, and the published weights quantized."""
        buffer = self.trainer.replay_buffer
        buffer.clear()
        for experience in self.rollout(prompt, lengths, torch.distributed.get_rank()):
            buffer.append(experience)
        for _ in self.trainer.publishing.tensors():
            pass
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free the device's memory: DeepSpeed's engine and optimizer hold each other, and hooks hold both.

        ZeRO-3 leaves its optimizer in hooks of the parameters that are never removed: what it holds, and they, are emptied.
        """
        engine = self.trainer.actor.model
        engine.destroy()
        engine.basic_optimizer.state.clear()
        engine.basic_optimizer.param_groups.clear()
        vars(engine.optimizer).clear()
        for parameter in engine.module.parameters():
            for held in (parameter, getattr(parameter, "ds_tensor", None)):
                if held is not None:
                    held.data = held.data.new_empty(0)
        self.trainer = self.clock = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
