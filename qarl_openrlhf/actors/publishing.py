"""A learner's weights into its engines: packed, pushed, verified and probed, and what that took."""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from qarl_openrlhf.actors.host_barrier import HostBarrier
from qarl_openrlhf.metrics.changed_codes import ChangedCodes
from qarl_openrlhf.quant.convert import published_tensors
from qarl_openrlhf.sync.gather import TimedGather
from qarl_openrlhf.sync.probe import LogprobProbe


class Publishing:
    """Of one process of the learner; all of them publish together.

    Args:
        args: of the run. actor: ``QuantActor``. engines: ``QarlRolloutActor`` handles, none for a learner without. device: the weights'.

    Attributes:
        version: of the last publish; the next one is one more.
        publisher: sends, on rank 0 of a learner with engines; None elsewhere.
    """

    def __init__(self, args, actor, engines: list | None, tokenizer, device: torch.device):
        self.args, self.actor, self.engines = args, actor, engines
        self.version = 0
        self.changed_codes = ChangedCodes()
        self.publisher = self.probe = None
        self._gather = TimedGather()
        self._barrier = HostBarrier()
        self._probed = False
        if not engines:
            return
        sync = args.sync
        if dist.get_rank() == 0:
            from qarl_openrlhf.sync.publisher import Publisher

            self.publisher = Publisher(
                engines, transport=sync.transport, device=device, bucket_mb=sync.bucket_mb, timeout_s=sync.timeout_s, verify=sync.verify
            )
        self.probe = LogprobProbe(
            tokenizer,
            max_tokens=args.data.max_len - 1,
            tolerance=sync.probe_tol,
            timeout_s=sync.timeout_s,
            barrier=self._barrier if args.vllm.enable_sleep else None,
        )

    def tensors(self, network: nn.Module | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """What engines get of the policy (or of another converted network), in checkpoint names. Every rank must exhaust it: ZeRO-3
        gathers layer by layer."""
        gather = self._gather if self.args.ds.zero_stage == 3 else None
        return published_tensors(self.actor.network if network is None else network, self.actor.scheme, gather=gather)

    def publish(self, when_probed: Callable[[], dict]) -> dict:
        """Publish the current weights to every engine, verify, probe; returns ``sync/*`` and ``timing/publish``.

        when_probed: called after a probe, for metrics that are asked as rarely. Errors name engine and tensor.
        """
        started = time.perf_counter()
        self.version += 1
        self._gather.seconds = 0.0
        cache = self.actor.quant_cache
        quantize_before = cache.stats.seconds
        tensors = self.tensors()
        metrics = {}
        if self.publisher is not None:
            metrics = self.publisher.publish(self.changed_codes.watch(tensors), self.version)
            metrics |= self.changed_codes.metrics()
        else:
            for _ in tensors:
                pass
        metrics["sync/quantise_ms"] = (cache.stats.seconds - quantize_before) * 1e3
        metrics["sync/gather_ms"] = self._gather.seconds * 1e3
        if not self._probed or self.version % self.args.sync.probe_every == 0:  # the first of this process, also after a resume
            self._probed = True
            metrics |= self._probe()
            metrics |= when_probed()
        if self.args.vllm.enable_sleep and torch.cuda.is_available():
            torch.cuda.empty_cache()  # of every rank, before anything of the engines' is woken
        self._barrier()
        return metrics | {"timing/publish": time.perf_counter() - started}

    def _probe(self) -> dict:
        """Engines go READY before they are probed, and go on with what a push had frozen: where the probe fails they are stopped."""
        try:
            return self.probe.run(self.actor, self.engines, self.version, is_sender=self.publisher is not None)
        except Exception as error:
            if self.publisher is not None:
                self.publisher.abandon(f"version {self.version}: {error}")
            raise
