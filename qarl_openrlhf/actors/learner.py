"""One rollout's worth of training: old log-probs in the training layout, the updates, the packed publish."""

import time

import ray
import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm
from torch.utils.data import DataLoader

from qarl_openrlhf.actors.kept import global_kept, optimizer_steps
from qarl_openrlhf.actors.loss import ObjectiveLoss, ObservedLoss
from qarl_openrlhf.actors.micro_batches import keep_whole_steps, to_device
from qarl_openrlhf.actors.publishing import Publishing
from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.metrics.diagnostics import Diagnostics
from qarl_openrlhf.metrics.kernels import KernelReport
from qarl_openrlhf.metrics.start_policy import MAX_RESPONSES, SHARE, StartPolicy
from qarl_openrlhf.objectives import band_warning, build_objective, metrics_from_sums
from qarl_openrlhf.quant.ungathered import ungathered


IN_BAND = ("objective/in_band_frac", "objective/in_band_frac_pos", "objective/in_band_frac_neg")
# What OpenRLHF gives as a micro-batch's part of its optimizer step's mean: parts add up, and have no weight of their own.
OF_A_STEP = ("policy_loss", "entropy_loss")


class QarlActorTrainer(ActorPPOTrainer):
    """``ActorPPOTrainer`` with r = 1 exactly before the first update, any objective, and one packed publish.

    OpenRLHF's replay buffer strips padding and collates anew, so log-probs computed at experience-making time belong to
    another layout than the training pass: in BF16 that alone moves sequence ratios out of narrow bands. Here the
    micro-batches of a rollout are fixed first and the old log-probs computed on exactly those.
    """

    def __init__(self, strategy, actor, ema_model, actor_optim, actor_scheduler, **kwargs):
        super().__init__(strategy, actor, ema_model, actor_optim, actor_scheduler, **kwargs)
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        if self.args.objective.name:
            self.actor_loss_fn = ObjectiveLoss(build_objective(self.args.objective.name, **self.args.objective.hyperparameters))
        else:
            self.actor_loss_fn = ObservedLoss(self.actor_loss_fn)
        self.actor.logprob_chunk = self.args.actor.logprob_chunk
        self.diagnostics = Diagnostics(self.device, self.tokenizer)
        self.start_policy = StartPolicy.load(self.args.metrics.dir) if self.args.ckpt.load_enable else None
        self.start_policy_saved = self.start_policy is not None
        self.publish_metrics: dict = {}
        self.kernel_report = KernelReport(self.args.quant.kernel)
        self.publishing = Publishing(self.args, self.actor, self.vllm_engines, self.tokenizer, self.device)

    def _init_vllm_sync_group(self, backend: str) -> None:
        """OpenRLHF's broadcast group is not used: the publisher makes its own."""

    # ---- training -----------------------------------------------------------------------------------------------------

    def ppo_train(self, kl_ctl: float) -> dict:
        """Train on the replay buffer; returns the rollout's metrics (on rank 0; other ranks return an empty dict)."""
        started = time.perf_counter()
        self._remember_start_policy()
        batches = self._fixed_micro_batches()
        if not batches:
            return {}
        sums = Sums()
        self.diagnostics.begin(getattr(self.actor_loss_fn, "objective", None))
        with torch.no_grad(), ungathered(self.actor.model, self.actor.network):
            for batch in batches:
                self._set_old_log_probs(batch, sums)
        old_log_probs_s = time.perf_counter() - started

        started = time.perf_counter()
        window = 1 if self.args.train.dynamic_batch_enable else self.strategy.accumulated_gradient
        for epoch in range(self.max_epochs):
            order = torch.randperm(len(batches)).tolist() if epoch else range(len(batches))
            if self.args.train.dynamic_batch_enable:
                ordered = batches
                ends = [bool(end) for end in self.replay_buffer.dynamic_optimizer_step]
                pairs = ((batch, None) for batch in ordered)
            else:
                ordered = [batches[i] for i in order]
                ends = [(i + 1) % window == 0 for i in range(len(ordered))]
                pairs = iter_grad_accum_global_norm(ordered, self.strategy, window, lambda batch: batch.action_mask)
            steps = dict(optimizer_steps(ordered, ends))
            for step, (batch, loss_info) in enumerate(pairs):
                if step in steps:
                    self._count_kept(steps[step], before_any_update=epoch == step == 0, accumulation=window)
                status = self.training_step(batch, kl_ctl, step, loss_info)
                update = sum(ends[:step])
                seen = self.actor_loss_fn
                self.diagnostics.updated(batch, seen.log_probs, seen.tokens, update + epoch * sum(ends))
                share = 1.0 if self.args.train.dynamic_batch_enable else 1 / window
                self._collect(sums, status, share=share, ends_step=ends[step], epoch_update=update if epoch == 0 else None)
        train_s = time.perf_counter() - started

        total = sums.over_ranks()
        metrics = total.metrics() | self._objective_metrics(total) | self.diagnostics.end()
        metrics["timing/old_logprobs"] = old_log_probs_s
        metrics["timing/train"] = train_s
        metrics["policy/updates"] = float(self.actor.model.global_steps)
        metrics |= self.kernel_report.metrics() | self._memory_metrics()
        return metrics if self.strategy.is_rank_0() else {}

    def _fixed_micro_batches(self) -> list[Experience]:
        """The rollout's micro-batches, collated once, in training order; only whole optimizer steps."""
        dynamic = self.args.train.dynamic_batch_enable
        if dynamic:
            self.replay_buffer.setup_dynamic_batch(self.strategy)
        else:
            keep_whole_steps(self.replay_buffer, self.strategy, "policy")
        if not len(self.replay_buffer):
            return []
        loader = DataLoader(
            self.replay_buffer,
            batch_size=self.replay_buffer.sample_batch_size,
            shuffle=not dynamic,
            drop_last=True,
            collate_fn=self.replay_buffer.collate_fn,
        )
        return [to_device(batch, self.device) for batch in loader]

    def _set_old_log_probs(self, batch: Experience, sums: Sums) -> None:
        self.actor.train()
        batch.action_log_probs = self._log_probs(batch)
        self.diagnostics.sampled(batch, sums, self.publishing.version)

    @torch.no_grad()
    def _log_probs(self, batch: Experience) -> torch.Tensor:
        """Log-probs [B, A] of the current policy, in the layout of the training pass."""
        return self.actor(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask)

    def _count_kept(self, batches: list[Experience], *, before_any_update: bool, accumulation: int) -> None:
        """Tell a dropping objective how much the optimizer step of these micro-batches keeps, over all ranks."""
        objective = getattr(self.actor_loss_fn, "objective", None)
        if objective is None or not objective.hyperparameters["drop"]:
            return
        known = before_any_update or not objective.drops_by_ratio
        self.actor_loss_fn.global_kept = global_kept(
            objective,
            batches,
            (lambda batch: batch.action_log_probs) if known else self._log_probs,
            group=self.strategy.ds_device_mesh["dp"].get_group(),
            accumulation=accumulation,
        )

    def _collect(self, sums: Sums, status: dict, *, share: float, ends_step: bool, epoch_update: int | None) -> None:
        """Add one micro-batch's metrics; objective metrics also by the index of the update within the rollout.

        share: of a micro-batch in its optimizer step's loss, as DeepSpeed adds them up.
        """
        tokens, samples = status["num_action_tokens"], status["num_samples"]
        counts = self.actor_loss_fn.normalisation
        for name, value in status["metrics"].items():
            weight = status["weights"][name]
            if name in OF_A_STEP:
                sums.add(name, value.float() * share, float(ends_step))
            elif name == "kl" and self.args.algo.kl.use_loss:
                sums.add(name, _token_sum(value, counts), tokens)
            elif weight is None:
                sums.last[name] = float(value)
            else:
                scale = tokens if weight == "token" else samples
                mean = value.float().mean() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                sums.add(name, mean * scale, scale)
        if "entropy_loss" in status["metrics"]:
            sums.add("policy/entropy", _token_sum(status["metrics"]["entropy_loss"], counts), tokens)
        if isinstance(self.actor_loss_fn, ObjectiveLoss):
            sums.merge_ratios(self.actor_loss_fn.sums)
            if epoch_update is not None:
                for name in IN_BAND:
                    sums.add(f"{name}_by_update/{epoch_update}", *self.actor_loss_fn.sums[name])

    def _objective_metrics(self, total: Sums) -> dict:
        """What is not a plain quotient of sums (the effective sample size), and a warning when few responses are in band."""
        if not isinstance(self.actor_loss_fn, ObjectiveLoss):
            return {}
        sums = {
            name: tuple(torch.tensor(x, dtype=torch.float32) for x in total.ratios[name]) for name in self.actor_loss_fn.sums
        }
        nothing = {name for name, (_, count) in sums.items() if not count}  # no response with A < 0, say: no share of them
        metrics = {name: float(value) for name, value in metrics_from_sums(sums).items() if name not in nothing}
        if "objective/in_band_frac" in metrics:
            metrics["ppo_clip_ratio"] = 1 - metrics["objective/in_band_frac"]  # whose units may be responses: OpenRLHF weighs it by tokens
        return metrics | {"objective/warning": band_warning(sums)}

    def _memory_metrics(self) -> dict:
        """GPU memory that this rollout's training and the publish before it took at most, of the rank that took the most."""
        if self.device.type != "cuda":
            return {}
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device=self.device)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = peaks.tolist()
        return {"memory/learner_peak_gib": allocated / 2**30, "memory/learner_reserved_gib": reserved / 2**30}

    def take_record(self) -> dict:
        """Histograms and responses of the last rollout and, once, the start policy's responses; each is given out once."""
        record, self.diagnostics.record = self.diagnostics.record, {}
        if self.start_policy and not self.start_policy_saved:
            self.start_policy_saved = True
            record["start_policy"] = self.start_policy.responses
        return record if self.strategy.is_rank_0() else {}

    def _remember_start_policy(self) -> None:
        """Keep a few responses of the start policy, before the first update ever (not after a resume)."""
        # At another temperature the sampler's log-probs are not those that an engine gives a prompt.
        if self.start_policy or self.publishing.publisher is None or self.actor.model.global_steps or self.args.rollout.temperature != 1:
            return
        items = self.replay_buffer.items
        if items and items[0].rollout_log_probs is not None:
            in_all = self.args.rollout.batch_size * self.args.rollout.n_samples_per_prompt
            count = max(1, min(MAX_RESPONSES, in_all // SHARE))
            # Dynamic batches put the longest responses first.
            order = torch.randperm(len(items), generator=torch.Generator().manual_seed(self.args.train.seed)).tolist()
            self.start_policy = StartPolicy.of([items[i] for i in order], count=count, max_length=self.args.data.max_len - 1)

    def _start_kl(self) -> dict:
        """KL(start policy || what was just published) by the first engine's log-probs of the kept responses."""
        # After a resume every rank has them, and only the sender knows that the publish has ended.
        if self.publishing.publisher is None or not self.start_policy or not self.start_policy.responses:
            return {}
        started = time.perf_counter()
        ids = [response["ids"] for response in self.start_policy.responses]
        scored = ray.get(self.vllm_engines[0].probe_logprobs.remote(ids), timeout=self.args.sync.timeout_s)
        return self.start_policy.kl(scored) | {"timing/start_kl": time.perf_counter() - started}

    # ---- publishing ---------------------------------------------------------------------------------------------------

    def broadcast_to_vllm(self) -> None:
        metrics = self.publishing.publish(self._start_kl)
        self.publish_metrics = metrics if self.strategy.is_rank_0() else {}


def _token_sum(mean: torch.Tensor, counts: dict) -> torch.Tensor:
    """The sum over a micro-batch's tokens of what OpenRLHF divided by the mean token count of the step's micro-batches."""
    return mean.float() * counts["batch_num_tokens"] / counts["dp_size"]
