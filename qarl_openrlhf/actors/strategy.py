"""OpenRLHF's DeepSpeed strategy, with the policy quantized before DeepSpeed sees it."""

from types import SimpleNamespace

import torch
from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy

from qarl_openrlhf.actors.quant_actor import QuantActor
from qarl_openrlhf.kernels import dispatch
from qarl_openrlhf.optim import muon
from qarl_openrlhf.patches.rotary import restore_frequencies
from qarl_openrlhf.quant.scheme import QuantScheme


class QarlStrategy(DeepspeedStrategy):
    """Converts the trained policy to a ``QuantActor`` and drops its packed weights whenever they may have changed.

    Only the entry that is trained and is an ``Actor`` is the policy: reference, EMA (both evaluation entries), critic and
    reward models stay unquantized.
    """

    def _ds_init_train_model(self, model, cfg: dict):
        if isinstance(model, Actor):
            quant = self.args.quant
            dispatch.set_kernel(quant.kernel)
            report = QuantActor.convert(model, QuantScheme.parse(quant.scheme), cache=quant.cache)
            self.print(report.table())
        if cfg["optim"] == "muon":
            with muon.in_place_of_deepspeeds(cfg["muon"], cfg["adam"]):
                # As "adam": OpenRLHF's Muon branch only sets DeepSpeed's own up, and warns of its faults.
                trained, optimizer, scheduler = super()._ds_init_train_model(model, {**cfg, "optim": "adam"})
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
        if optimizer and optimizer["type"] == "AdamW" and not self.adam_offload:
            # PyTorch's AdamW has the same arithmetic as DeepSpeed's fused one, which a compiler takes minutes to build.
            optimizer["params"]["torch_adam"] = True
            if torch.cuda.is_available():
                optimizer["params"]["fused"] = True
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

    def load_ckpt(self, model, *args, **kwargs):
        loaded = super().load_ckpt(model, *args, **kwargs)
        cache = getattr(getattr(model, "module", model), "quant_cache", None)
        if cache is not None:
            cache.invalidate()
        return loaded

    def moving_average(self, model, model_ema, beta=0.992, device="cpu") -> None:
        device = device if torch.cuda.is_available() else "cpu"  # the trainer passes "cuda", whatever the machine has
        super().moving_average(model, model_ema, beta, device)


def make_strategy(args) -> QarlStrategy:
    """Stands in for ``openrlhf.utils.get_strategy``."""
    return QarlStrategy(
        seed=args.train.seed,
        full_determinism=args.train.full_determinism_enable,
        max_norm=args.actor.max_norm,
        micro_train_batch_size=args.train.micro_batch_size,
        train_batch_size=args.train.batch_size,
        zero_stage=args.ds.zero_stage,
        args=args,
    )
