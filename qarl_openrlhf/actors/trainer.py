"""The controller: publishes before the first rollout, merges and writes the metrics of every step."""

import time

import ray
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import set_seed

from qarl_openrlhf.actors.filtering import tell_filtered
from qarl_openrlhf.actors.model_workers import plain_class
from qarl_openrlhf.actors.samples import QarlSamplesGenerator, mean_logs
from qarl_openrlhf.actors.tracking import QarlWandbLogger
from qarl_openrlhf.metrics.band_length import band_scale_line
from qarl_openrlhf.metrics.changed_codes import still_line
from qarl_openrlhf.metrics.records import write_records
from qarl_openrlhf.metrics.writer import MetricsWriter


class QarlExperienceMaker(RemoteExperienceMaker):
    """Skips the policy forward at experience-making time: the learner computes the old log-probs itself, in the training layout.

    Only a KL term in the reward needs log-probs here.
    """

    def _dispatch_forward(self, group, sync_condition, **kwargs):
        if group is self.actor_model_group and not self._reward_needs_kl():
            placeholder = [mask.float() * 0 for mask in kwargs["action_mask"]]
            return [ray.put(placeholder)]
        return super()._dispatch_forward(group, sync_condition, **kwargs)

    def compute_advantages_and_returns(self, experiences: list) -> list:
        """OpenRLHF's, from rewards in float64: in float32 the mean of seven rewards of 0.7 is not 0.7, and ``group_norm`` divides what is
        left by a deviation of about 0 plus 1e-9, so that a group without a better response is pushed as one, by an advantage of 1 to 60."""
        for experience in experiences:
            experience.rewards = experience.rewards.double()
        return super().compute_advantages_and_returns(experiences)

    def get_cumulative_returns(self, rewards, action_mask, gamma: float):
        """OpenRLHF's sums in one call, to the last bit: it loops over the tokens of each batch, minutes of long responses in which every
        GPU waits. float32 [B, T] like ``rewards``."""
        if gamma != 1 or rewards.is_cuda:
            return super().get_cumulative_returns(rewards, action_mask, gamma)
        masked = rewards if action_mask is None else action_mask * rewards
        # numpy adds one after the other in float32, as a loop does; torch.cumsum in double.
        return torch.from_numpy(masked.flip(1).numpy().cumsum(axis=1, dtype="float32")).flip(1).to(rewards.dtype)

    def _reward_needs_kl(self) -> bool:
        return self.initial_model_group is not None and not self.args.algo.kl.use_loss


# The trainers look their helpers up in the module of the base class.
ppo_trainer.RemoteExperienceMaker = QarlExperienceMaker
ppo_trainer.WandbLogger = QarlWandbLogger
ppo_trainer.SamplesGenerator = ppo_trainer_async.SamplesGenerator = QarlSamplesGenerator


class ReportingTrainer:
    """What the synchronous and the asynchronous trainer share. Mixed in before OpenRLHF's ``BasePPOTrainer``."""

    sampled_tokens = 0  # since the rollout before, see ``QarlSamplesGenerator``
    overlapping = False  # rollout and update at the same time: the step's time is then OpenRLHF's wall clock

    def __init__(self, pretrain, strategy, *args, **kwargs):
        set_seed(strategy.args.train.seed)  # of the order of the prompts; OpenRLHF seeds the learners only
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.metrics_writer = MetricsWriter(self.args.metrics.dir)
        self.sync_metrics: dict = {}
        self.started = self.published = False
        self.trained = {"steps": 0, "filled": 0}  # rollouts of this process, see ``tell_filtered``

    def note_engine_kernels(self) -> None:
        """Say once which kernels the engines run, where vLLM chose them."""
        if kernels := ray.get(self.vllm_engines[0].kernels.remote()):
            self.metrics_writer.note("engine kernels: " + "; ".join(f"{kind} {name}" for kind, name in kernels.items()))

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()  # OpenRLHF drops what the actors return
        self.sync_metrics = ray.get(self.actor_model_group.async_run_method(method_name="publish_metrics"))[0]
        if not self.published:
            self.published = True
            sent, seconds = self.sync_metrics["sync/bytes"] / 1e6, self.sync_metrics["timing/publish"]
            self.metrics_writer.note(
                f"start: first publish, {sent:.1f} MB to each engine and verified, {seconds:.1f} s; first rollout ..."
            )

    def train_step(self, rollout_samples, global_step: int):
        started = time.perf_counter()
        if not self.started:
            self.started = True
            self.metrics_writer.note(start_policy_line(rollout_samples, self.args))
            if line := band_scale_line(rollout_samples, self.args):
                self.metrics_writer.note(line)
        status, next_step = super().train_step(rollout_samples, global_step)
        self._count(len(rollout_samples), next_step)
        write_records(self.args.metrics.dir, next_step, ray.get(self.actor_model_group.async_run_method("take_record"))[0])
        status = mean_logs(rollout_samples) | status | self.sync_metrics  # what we and OpenRLHF measure keeps its names
        status["rollout/tokens"] = float(sum(int(sample.action_mask.sum()) for sample in rollout_samples))
        self.sampled_tokens = rollout_samples[0].sampled_tokens
        if (mixed := mixed_group_fraction(rollout_samples, self.args.rollout.n_samples_per_prompt)) is not None:
            status["rollout/mixed_group_frac"] = mixed
        status["timing/update_total"] = time.perf_counter() - started
        return status, next_step

    def _count(self, responses: int, step: int) -> None:
        needed = self.args.train.batch_size
        self.trained["steps"] += 1
        self.trained["filled"] += responses >= needed
        if responses < needed:
            self.metrics_writer.note(
                f"step {step}: nothing is trained, as {responses} responses make no optimizer step (--train.batch_size {needed})"
            )

    def rollouts_trained(self) -> dict[str, int]:
        return self.trained

    def note(self, text: str) -> None:
        self.metrics_writer.note(text)

    def ppo_train(self, global_steps: int) -> dict:
        status = super().ppo_train(global_steps)
        if global_steps <= self.args.critic.freezing_steps:
            # OpenRLHF's actor, which did not train, would keep the rollout and train on all of them when it is freed.
            ray.get(self.actor_model_group.async_run_method(method_name="drop_rollout"))
        return status

    def init_checkpoint_states(self) -> dict:
        states = super().init_checkpoint_states()
        if self.args.algo.kl.target:
            self.kl_ctl.value = states.pop("kl_coef", self.kl_ctl.value)
        return states

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        if client_states and self.args.algo.kl.target:  # else it is the flag's
            client_states["kl_coef"] = float(self.kl_ctl.value)  # of numpy's, which not every reader of a checkpoint takes
        logs = dict(logs_dict or {})
        # Not of what is trained on: some is filtered out, and some was sampled in another step.
        generation = logs.get("timing/generation")
        if generation and self.sampled_tokens:
            logs["rollout/tok_per_s"] = self.sampled_tokens / generation
        sample = logs.pop("generated_samples", None)
        if choices := logs.pop("kernels/choices", None):
            self.metrics_writer.note(f"kernels chosen by --quant.kernel auto:\n{choices}")
        warning = logs.pop("objective/warning", None)
        if warning:
            self.metrics_writer.note(f"step {global_step}: {warning}")
        if line := still_line(self.args, global_step, logs.get("sync/changed_code_frac_total"), logs.get("rollout/mixed_group_frac")):
            self.metrics_writer.note(line)
        update = logs.pop("timing/update_total", 0.0)
        if not self.overlapping:
            logs["timing/step_total"] = logs.get("timing/generation", 0.0) + update
        self.metrics_writer.write(global_step, logs)
        super().save_logs_and_checkpoints(global_step, logs | ({"generated_samples": sample} if sample else {}), client_states)

    def save_best_checkpoint(self, eval_metrics, global_step: int, client_states=None) -> None:
        """After each evaluation, which OpenRLHF shows in wandb and tensorboard alone."""
        if eval_metrics:
            self.metrics_writer.evaluation(global_step, eval_metrics)
        super().save_best_checkpoint(eval_metrics, global_step, client_states)


class QarlPPOTrainer(ReportingTrainer, plain_class(ppo_trainer.PPOTrainer)):
    """OpenRLHF's synchronous trainer; engines start with dummy weights, so the first publish precedes the first rollout."""

    def fit(self, global_step: int = 0) -> None:
        self.note_engine_kernels()
        resumed = bool(self.init_checkpoint_states()["global_step"])
        if not resumed:  # else OpenRLHF publishes what was loaded
            self.broadcast_to_vllm()
            self._evaluate_start_policy()
        super().fit(global_step)
        if note := tell_filtered(self.args, **self.samples_generator.filtered(), **self.trained, resumed=resumed):
            self.note(note)

    def _evaluate_start_policy(self) -> None:
        """What later evaluations are compared with. It takes no part in the choice of the best checkpoint."""
        evaluation = self.args.eval
        if self.eval_dataloader and evaluation.steps != float("inf"):
            how = {"temperature": evaluation.temperature, "n_samples_per_prompt": evaluation.n_samples_per_prompt}
            self.metrics_writer.evaluation(0, self.evaluate(0, **self.generate_kwargs | how))

    def init_checkpoint_states(self) -> dict:
        states = super().init_checkpoint_states()
        if rollout := states.pop("rollout", None):
            self.samples_generator.resume(rollout)
        return states

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        if client_states:
            keep_rollout_state(client_states, self.samples_generator)
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)


class QarlTrainingActor(ReportingTrainer, plain_class(ppo_trainer_async.TrainingActor)):
    overlapping = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Around each publish OpenRLHF would pause and resume what samples, without a time limit, and also engines whose weights are
        # half new. An update of ours pauses them itself, and they go on when it is complete.
        self._partial_rollout = False


class QarlGenerateSamplesActor(plain_class(ppo_trainer_async.GenerateSamplesActor)):
    evaluated: int = 0  # step whose weights the engines had in the last evaluation

    def __init__(self, pretrain, strategy, *args, **kwargs):
        set_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.rollout_queue = _StatefulQueue(self.rollout_queue, self)

    def resume(self, rollout: dict) -> None:
        self.samples_generator.resume(rollout)

    def filtered(self) -> dict[str, int]:
        return self.samples_generator.filtered()

    def _run_eval(self) -> dict:
        # The lock that it holds keeps publishes out. Version 1 is the base model's.
        self.evaluated = ray.get(self.samples_generator.vllm_engines[0].weights_state.remote())["version"] - 1
        return super()._run_eval()


class _StatefulQueue:
    """OpenRLHF's queue from the generator to the trainer; what is put also carries what a checkpoint must know of the generator as
    it is now: the trainer, which writes it, is a rollout behind."""

    def __init__(self, queue, generator: QarlGenerateSamplesActor):
        self.queue, self.generator = queue, generator

    def put(self, payload, **options) -> None:
        if payload[0] == "eval":  # OpenRLHF's step is that of an earlier moment
            payload = ("eval", self.generator.evaluated, payload[2])
        elif payload != "done":
            keep_rollout_state(payload[1], self.generator.samples_generator)
        self.queue.put(payload, **options)


def keep_rollout_state(client_states: dict, generator: QarlSamplesGenerator) -> None:
    """What a checkpoint must keep of a generator, and the episode in which a resume goes on."""
    client_states["rollout"] = rollout = generator.rollout_state()
    if rollout["exhausted"] and not rollout["sample_buffer"]:
        client_states["episode"] += 1  # the loop's next act; a resume would repeat the episode


class QarlVLLMLock(plain_class(ppo_trainer_async.VLLMLock)):
    pass


class QarlPPOTrainerAsync(plain_class(ppo_trainer_async.PPOTrainerAsync)):
    """OpenRLHF's asynchronous trainer, publishing before the generator starts."""

    def __init__(self, *args, **kwargs):
        # The training actor writes the run directory, which the driver reads: same node as this actor, which has the driver's.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        ppo_trainer_async.TrainingActor = ray.remote(QarlTrainingActor).options(scheduling_strategy=here)
        super().__init__(*args, **kwargs)
        self.args = args[1].args

    def fit(self) -> None:
        states = ray.get(self.trainer_actor.init_checkpoint_states.remote())
        if not states["global_step"]:  # else OpenRLHF publishes what was loaded
            ray.get(self.trainer_actor.broadcast_to_vllm.remote())
        if rollout := states.get("rollout"):
            ray.get(self.generator_actor.resume.remote(rollout))
        super().fit()
        filtered, trained = ray.get([self.generator_actor.filtered.remote(), self.trainer_actor.rollouts_trained.remote()])
        if note := tell_filtered(self.args, **filtered, **trained, resumed=bool(states["global_step"])):
            ray.get(self.trainer_actor.note.remote(note))


ppo_trainer_async.VLLMLock = ray.remote(num_cpus=0)(QarlVLLMLock)
ppo_trainer_async.GenerateSamplesActor = ray.remote(QarlGenerateSamplesActor)


def mixed_group_fraction(samples: list, group: int) -> float | None:
    """Share of the prompts whose responses did not all get the same reward: the ones that carry a gradient. None without rewards: a
    reward model's come later."""
    rewards = [float(sample.rewards.flatten()[0]) for sample in samples if sample.rewards is not None]
    groups = [rewards[i : i + group] for i in range(0, len(rewards), group)]
    return sum(len(set(g)) > 1 for g in groups) / len(groups) if groups else None


def start_policy_line(samples: list, args) -> str:
    """One line on the policy before the first update of this process, in the scheme it is sampled with."""
    group, resumed = args.rollout.n_samples_per_prompt, args.ckpt.load_enable
    rewards = [float(sample.rewards.flatten()[0]) for sample in samples if sample.rewards is not None]
    if not rewards:
        return f"{'resumed' if resumed else 'start'} policy: rewards come from a reward model"
    mean = sum(rewards) / len(rewards)
    error = (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1) / len(rewards)) ** 0.5
    mixed = mixed_group_fraction(samples, group)
    hopeless = "" if mixed or group == 1 else (
        ": in none of them is one response better than another, so there is nothing to learn from; use easier prompts or more samples a "
        "prompt, or look at the reward"
    )
    return (
        f"{f'policy resumed from {args.ckpt.load_tag}' if resumed else 'start policy'} (as sampled, before training): "
        f"mean reward {mean:.3f} +- {error:.3f} on {len(rewards)} responses, "
        f"mixed groups {mixed:.0%}{hopeless}"
    )
