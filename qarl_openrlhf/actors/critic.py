"""The critic's step with metrics that do not depend on how its responses lie in micro-batches."""

from openrlhf.trainer.ray import ppo_critic


class QarlCriticTrainer(ppo_critic.CriticPPOTrainer):
    """``CriticPPOTrainer``, whose metrics are plain means over ranks and micro-batches: ``critic_loss``, of which a dynamic micro-batch has
    the part that adds up to its step's, and ``values``, which a short micro-batch would weigh as much as a long one."""

    def ppo_train(self) -> dict[str, float]:
        status = super().ppo_train()
        if status:  # as the policy's; a mean over micro-batches has the norm of the rollout before until this one's first step
            status["critic_grad_norm"] = self.strategy.get_grad_norm(self.critic)
            status["critic_lr"] = self.critic_scheduler.get_last_lr()[0]
        return status

    def training_step(self, experience, step: int, loss_batch_info: dict | None = None) -> dict[str, float]:
        status = super().training_step(experience, step, loss_batch_info)
        tokens = int(experience.action_mask.sum()) * self.strategy.ds_device_mesh["dp"].size()
        if loss_batch_info is None:
            buffer = self.replay_buffer
            micro_batches = len(buffer) / sum(buffer.dynamic_optimizer_step)  # of a step
            status["critic_loss"] *= micro_batches
            share = tokens / buffer.dynamic_batch_num_tokens[step] * micro_batches
        else:
            share = tokens / float(loss_batch_info["batch_num_tokens"])
        status["values"] = status["values"] * share if tokens else 0.0  # the mean of nothing is NaN
        return status
