"""OpenRLHF's DeepSpeed strategy, with the policy quantized before DeepSpeed sees it."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy

from qarl_openrlhf.actors.moving_average import blend
from qarl_openrlhf.actors.quant_actor import QuantActor
from qarl_openrlhf.checkpoint.facts import facts_of
from qarl_openrlhf.checkpoint.flags import deciding, flatten
from qarl_openrlhf.checkpoint.prompts import position
from qarl_openrlhf.checkpoint.state import random_state, rank_file
from qarl_openrlhf.checkpoint.write import rotate_together, write_checkpoint
from qarl_openrlhf.files import let_umask_rule
from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.optim import adam8bit, muon
from qarl_openrlhf.patches.rotary import restore_frequencies
from qarl_openrlhf.planning.reduce_bucket import reduce_bucket
from qarl_openrlhf.preflight.ports import named
from qarl_openrlhf.quant.scheme import QuantScheme


class QarlStrategy(DeepspeedStrategy):
    """Converts the trained policy to a ``QuantActor`` and drops its packed weights whenever they may have changed.

    Only the entry that is trained and is an ``Actor`` is the policy: reference, EMA (both evaluation entries), critic and
    reward models stay unquantized.
    """

    flags: dict = {}  # of the run, for its checkpoints
    rank_state: dict = {}  # what this process wants in its next checkpoint besides its random state
    loaded_state: dict | None = None  # what it had saved in the checkpoint that was loaded
    trained_weights: int | None = None  # of the model that is being set up

    def setup_distributed(self, *args, **kwargs) -> None:
        """OpenRLHF's; PortError naming the holder if the port that was free when it was chosen has been taken since."""
        try:
            super().setup_distributed(*args, **kwargs)
        except RuntimeError as error:
            raise (named(error) or error) from None

    def _ds_init_train_model(self, model, cfg: dict):
        if isinstance(model, Actor):
            quant = self.args.quant
            dispatch.set_kernel(quant.kernel)
            report = QuantActor.convert(model, QuantScheme.parse(quant.scheme), cache=quant.cache)
            self.print(report.table())
        self.trained_weights = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
        if cfg["optim"] == "muon":
            with muon.in_place_of_deepspeeds(cfg["muon"], cfg["adam"]):
                # As "adam": OpenRLHF's Muon branch only sets DeepSpeed's own up, and warns of its faults.
                trained, optimizer, scheduler = super()._ds_init_train_model(model, {**cfg, "optim": "adam"})
        elif cfg["adam"].get("state_bits") == 8:
            with adam8bit.in_place_of_deepspeeds(cfg["adam"]):
                trained, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        else:
            trained, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        restore_frequencies(trained)
        return trained, optimizer, scheduler

    def _ds_init_eval_model(self, model):
        model = super()._ds_init_eval_model(model)
        if model:
            restore_frequencies(model)
        return model

    def get_ds_train_config(self, optim_dict: dict | None = None, *, max_norm: float | None = None) -> dict:
        config = super().get_ds_train_config(optim_dict, max_norm=max_norm)
        optimizer = config.get("optimizer")
        if optimizer and optimizer["type"] == "AdamW":
            # PyTorch's AdamW has the same arithmetic as DeepSpeed's for GPUs and for main memory, which a compiler takes minutes to
            # build. Fused is one pass over weights and states, where main memory would have to be waited for ten times.
            optimizer["params"] |= {"torch_adam": True, "fused": True}
        if self.trained_weights:
            config["zero_optimization"]["reduce_bucket_size"] = reduce_bucket(self.trained_weights)
        if self.use_dynamic_batch:
            # OpenRLHF calls backward once a micro-batch and step once an optimizer step, with an accumulation of 1. DeepSpeed 0.19
            # takes every backward for a whole step then, and keeps the gradient of the last one alone.
            config["managed_gradient_accumulation"] = False
        return config

    def optimizer_step(self, optimizer, model, scheduler, name="model", **kwargs) -> None:
        super().optimizer_step(optimizer, model, scheduler, name=name, **kwargs)
        if isinstance(model, QuantActor):
            model.weights_changed()

    def print(self, *message) -> None:
        """OpenRLHF prints all arguments and every model; those are in run.json and in the model's config."""
        shown = [m for m in message if not isinstance(m, (SimpleNamespace, torch.nn.Module))]
        if shown or not message:
            super().print(*shown)

    def save_ckpt(
        self,
        model,
        save_dir,
        tag=None,
        max_num=3,
        max_mem=1000,
        client_state=None,
        save_latest=True,
        metric_value=None,
        metric_key=None,
    ) -> None:
        """OpenRLHF's, written whole or not at all, with this rank's random state and ``self.rank_state`` in it.

        CheckpointError if it cannot be written; see ``checkpoint.write``.
        """
        facts = {"zero_stage": self.args.ds.zero_stage, "world_size": dist.get_world_size()}
        role = "critic" if os.path.basename(os.path.normpath(save_dir)) == "_critic" else "actor"
        facts |= facts_of(self.args, role, getattr(model, "module", model).config) | {"flags": self.flags}
        facts |= {"metric_key": metric_key, "metric_value": metric_value, "prompts": position(client_state or {})}
        state = {"random": random_state(), **self.rank_state}
        write_checkpoint(model, save_dir, tag, client_state=client_state or {}, rank_state=state, facts=facts)
        if self.is_rank_0():
            # Where OpenRLHF looks for it when it chooses what to remove.
            self._write_ckpt_metric(os.path.join(save_dir, tag), metric_value, metric_key=metric_key)
            # A run without a critic may have the directory of an earlier one's, which gets no checkpoint any more.
            models = ["_actor", "_critic"] if self.args.critic.model_name_or_path else [Path(save_dir).name]
            directories = [Path(save_dir).with_name(model) for model in models]
            for removed in rotate_together(directories, tag, keep=max_num, max_gb=max_mem, metric=self._read_ckpt_metric):
                self.print(f"removed checkpoint {removed}")

    def load_ckpt(self, model, load_dir, tag=None, **kwargs):
        """OpenRLHF's, of the checkpoint that was chosen before the run began; ``self.loaded_state`` is what this rank had saved."""
        tag = tag or self.args.ckpt.load_tag
        loaded = super().load_ckpt(model, load_dir, tag, **kwargs)
        path = rank_file(Path(load_dir, tag), dist.get_rank())
        self.loaded_state = torch.load(path, map_location="cpu", weights_only=False) if path.is_file() else {}
        cache = getattr(getattr(model, "module", model), "quant_cache", None)
        if cache is not None:
            cache.invalidate()
        return loaded

    def save_model(self, model, tokenizer, output_dir, **kwargs) -> None:
        """OpenRLHF's, with tied weights once, as the base model has them: it clones every tensor, and transformers then takes
        an embedding and its lm_head for two."""
        network = self._unwrap_model(model)
        save, tied = network.save_pretrained, getattr(network, "all_tied_weights_keys", None) or {}

        def save_once(directory, *, state_dict=None, **options):
            if state_dict is not None:
                state_dict = {name: tensor for name, tensor in state_dict.items() if tied.get(name) not in state_dict}
            saved = save(directory, state_dict=state_dict, **options)
            let_umask_rule(directory)
            return saved

        network.save_pretrained = save_once
        try:
            super().save_model(model, tokenizer, output_dir, **kwargs)
        finally:
            del network.save_pretrained

    def moving_average(self, model, model_ema, beta=0.992, device="cpu") -> None:
        """OpenRLHF's, but on the shards themselves: it writes to gathered ZeRO-3 parameters, which DeepSpeed then throws away,
        so that with two processes or more the average stayed the base model."""
        self.time_steps["ema"] += 1
        if self.time_steps["ema"] % self.accumulated_gradient == 0 or self.use_dynamic_batch:
            blend(model_ema, model, beta)


def make_strategy(args) -> QarlStrategy:
    """Stands in for ``openrlhf.utils.get_strategy``."""
    strategy = QarlStrategy(
        seed=args.train.seed,
        full_determinism=args.train.full_determinism_enable,
        max_norm=args.actor.max_norm,
        micro_train_batch_size=args.train.micro_batch_size,
        train_batch_size=args.train.batch_size,
        zero_stage=args.ds.zero_stage,
        args=args,
    )
    strategy.flags = deciding(dict(flatten(args)))  # here, before anything changes an argument in a worker
    return strategy
