"""The Ray actor that owns the learner."""

from collections.abc import Iterator

import torch
from openrlhf.trainer.ray import ppo_actor, ppo_critic

from qarl_openrlhf.actors import asleep, moving_average
from qarl_openrlhf.actors.cores import use_cores
from qarl_openrlhf.actors.learner import QarlActorTrainer
from qarl_openrlhf.actors.model_workers import KeepsPort, plain_class, resume_random_state
from qarl_openrlhf.export.write import export_checkpoint
from qarl_openrlhf.patches import liger, zero3_loading
from qarl_openrlhf.planning.paths import quantized_directory
from qarl_openrlhf.quant.convert import convert_model

# ``PolicyModelActor.init_model_from_pretrained`` looks the trainer class up in its module.
ppo_actor.ActorPPOTrainer = QarlActorTrainer
# ``--ds.enable_sleep`` of any optimizer, not only DeepSpeed's FusedAdam.
for module in (ppo_actor, ppo_critic):
    module.offload_deepspeed_states, module.reload_deepspeed_states = asleep.offload, asleep.reload


# Of a card that must be free for memory to be kept: an engine's apply and the transport's buffers want some now and then.
SPARE = 0.1


def others_want_memory(args) -> bool:
    """Whether something on the learner's GPUs takes memory in turn with it: an engine that sleeps, another model."""
    others = args.algo.kl.init_coef > 0 or args.critic.model_name_or_path or not args.reward.remote_url
    if not args.train.colocate_all:
        return bool(others)
    return bool(args.vllm.enable_sleep or args.ds.enable_sleep or others)


class QarlPolicyActor(KeepsPort, plain_class(ppo_actor.PolicyModelActor)):
    """``PolicyModelActor`` with a ``QuantActor`` and our trainer step."""

    def init_model_from_pretrained(self, strategy, pretrain, max_steps=None, vllm_engines=None):
        use_cores(strategy.args, strategy.args.actor)
        zero3_loading.apply()
        liger.keep_experts(strategy.args)
        super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)
        if strategy.loaded_state:
            # The publish before the next rollout repeats the one of the checkpoint's weights.
            self.trainer.publishing.version = strategy.loaded_state["version"] - 1
            self.trainer.publishing.changed_codes.first = strategy.loaded_state["first_codes"]
        if strategy.loaded_state is not None and self.ema_model is not None:
            moving_average.resume(self.ema_model, self.actor, strategy.loaded_state)

    def fit(self, kl_ctl: float = 0) -> dict:
        """OpenRLHF's, which gives all freed memory back to the driver before and after each training and so asks for it anew in
        each step; that memory is kept here where nobody else wants it."""
        resume_random_state(self.strategy)
        if others_want_memory(self.strategy.args):
            return super().fit(kl_ctl)
        self.actor.train()
        status = self.trainer.ppo_train(kl_ctl)
        self.trainer.replay_buffer.clear()
        torch.cuda.synchronize()
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            if free < SPARE * total:
                torch.cuda.empty_cache()
        return status

    def drop_rollout(self) -> None:
        """Of a step in which only the critic is trained (``--critic.freezing_steps``)."""
        self.trainer.replay_buffer.clear()

    def save_checkpoint(self, tag, client_states=None, metric_value=None, metric_key=None) -> None:
        first_codes = self.trainer.publishing.changed_codes.first  # half a byte a weight, on a CPU only
        self.strategy.rank_state = {"version": self.trainer.publishing.version, "first_codes": first_codes}
        if self.ema_model is not None:
            self.strategy.rank_state["ema_float32"] = moving_average.parts(self.ema_model)  # on a GPU: torch.save copies one at a time
            if self.save_hf_ckpt:
                moving_average.write(self.ema_model)
        super().save_checkpoint(tag, client_states, metric_value, metric_key)

    def publish_metrics(self) -> dict:
        """``sync/*`` and ``timing/publish`` of the last publish (rank 0; other ranks have none)."""
        return self.trainer.publish_metrics

    def take_record(self) -> dict:
        """What the last rollout left for the run directory, see ``metrics/records.py`` (rank 0; others have none)."""
        return self.trainer.take_record()

    def save_model(self) -> None:
        """The BF16 model as OpenRLHF saves it and, for a quantized policy, the compressed-tensors export beside it.

        With ``--train.enable_ema`` both are of the moving average.
        """
        if self.ema_model is not None:
            moving_average.write(self.ema_model)
        super().save_model()
        if self.actor.scheme.quantized:
            self.export_quantized(quantized_directory(self.strategy.args))

    def export_quantized(self, directory: str) -> None:
        """Write the saved weights, quantized, as a checkpoint that ``vllm serve`` loads. All ranks call it (ZeRO-3 gathers)."""
        tensors = self.trainer.publishing.tensors() if self.ema_model is None else self._averaged_tensors()
        if self.strategy.is_rank_0():
            network = self.actor.network
            given = getattr(network, "generation_config", None)
            export_checkpoint(tensors, network.config, directory, self.actor.scheme, tokenizer=self.tokenizer, generation_config=given)
        else:
            for _ in tensors:
                pass
        torch.distributed.barrier()

    def _averaged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What engines would get if the moving average were published; it is converted as the policy was, names and weights stay."""
        network = getattr(self.ema_model.model, "module", self.ema_model.model)
        if not hasattr(network, "quant_cache"):
            convert_model(network, self.actor.scheme, cache="none")
        return self.trainer.publishing.tensors(network)
