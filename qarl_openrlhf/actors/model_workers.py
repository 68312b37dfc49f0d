"""Reference, reward and critic actors: OpenRLHF's own, in a worker that has our patches.

All our actor classes stay plain at module level and are wrapped by ``ray.remote`` in ``install``: only then does Ray pickle
them by reference, so that the worker imports this package, which applies the patches.
"""

import socket

from openrlhf.trainer.ray import launcher, ppo_critic

from qarl_openrlhf.actors.cores import use_cores
from qarl_openrlhf.actors.critic import QarlCriticTrainer
from qarl_openrlhf.actors.micro_batches import keep_whole_steps
from qarl_openrlhf.checkpoint.state import set_random_state
from qarl_openrlhf.patches import liger
from qarl_openrlhf.patches.rotary import restore_frequencies

# ``CriticModelActor.init_model_from_pretrained`` looks the trainer class up in its module.
ppo_critic.CriticPPOTrainer = QarlCriticTrainer


def plain_class(actor_class) -> type:
    """The Python class as it was written, under ``@ray.remote``.

    Not ``modified_class``: a subclass of that inherits its identity, so that a handle looked up by name rebuilds the parent.
    """
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


class KeepsPort:
    """A rank 0 chooses the port where the ranks meet when its process starts, and listens there when models are loaded, minutes later
    beside engines that start: kept from others until then."""

    _kept: socket.socket | None = None

    def _get_free_port(self) -> int:
        self._kept = socket.socket()
        self._kept.bind(("", 0))
        return self._kept.getsockname()[1]

    def _setup_distributed(self, strategy) -> None:
        if self._kept:
            self._kept.close()
        super()._setup_distributed(strategy)


class ReferenceModelActor(KeepsPort, plain_class(launcher.ReferenceModelActor)):
    def init_model_from_pretrained(self, strategy, pretrain):
        """With ``--ref.load_in_4bit`` an NF4 model outside of DeepSpeed, whole on every rank: ZeRO-3 would cut its codes apart, and
        OpenRLHF's own flag for it would also load the policy and the critic in NF4."""
        args = strategy.args
        liger.keep_experts(args)
        if not args.ref.load_in_4bit:
            super().init_model_from_pretrained(strategy, pretrain)
            return
        self._setup_distributed(strategy)
        self.model = launcher.Actor(
            pretrain, attn_implementation=args.ds.attn_implementation, load_in_4bit=True, packing_samples=args.ds.packing_samples,
            temperature=args.rollout.temperature,
        ).eval()  # fmt: skip
        restore_frequencies(self.model)


class RewardModelActor(KeepsPort, plain_class(launcher.RewardModelActor)):
    pass


class CriticModelActor(KeepsPort, plain_class(ppo_critic.CriticModelActor)):
    def init_model_from_pretrained(self, strategy, pretrain, max_steps):
        use_cores(strategy.args, strategy.args.critic)
        super().init_model_from_pretrained(strategy, pretrain, max_steps)

    def fit(self) -> dict:
        """OpenRLHF's, on whole optimizer steps; metrics of the training, none where the rollout has too few responses for a step."""
        resume_random_state(self.strategy)
        if not self.strategy.args.train.dynamic_batch_enable:  # dynamic batches are whole steps
            keep_whole_steps(self.trainer.replay_buffer, self.strategy, "critic")
            if not self.trainer.replay_buffer.items:
                return {}
        return super().fit()


def resume_random_state(strategy) -> None:
    """Before the first update after a resume: everything since the start may have drawn random numbers, the saved run had not."""
    if strategy.loaded_state:
        set_random_state(strategy.loaded_state.pop("random"))
        strategy.loaded_state = None
