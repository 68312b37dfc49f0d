"""A learner of several ranks: master weights partitioned as ZeRO-3 does, gathered by all of them, published by rank 0."""

import os
import time
from contextlib import nullcontext
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from qarl_openrlhf.bench import sync
from qarl_openrlhf.runtime import free_port
from qarl_openrlhf.sync.gather import TimedGather

JOIN_TIMEOUT = timedelta(seconds=180)


class LearnerRank(sync.Learner):
    """One rank's process (a Ray actor). ``join`` builds it: no rank can make its shards before all have met.

    What it gathers is what a training run gathers: every parameter alone, but for small ones (norms), which DeepSpeed leaves
    whole from one optimizer step to the next.
    """

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.gathered = TimedGather()

    def meeting_point(self) -> tuple[str, int]:
        """Address and free port of this rank's host."""
        return ray.util.get_node_ip_address(), free_port()

    def join(self, address: str, port: int, *args, device: str, **kwargs) -> None:
        """Meet the other ranks, then build the model; args and kwargs are ``Learner``'s."""
        from qarl_openrlhf import patches

        patches.apply()
        import deepspeed

        # Ray shows every rank one GPU, its own.
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if device == "cuda":
            torch.cuda.set_device(0)
        deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo", timeout=JOIN_TIMEOUT)
        super().__init__(*args, device=device, **kwargs)

    def _masters(self, model_class) -> torch.nn.Module:
        """A model whose parameters lie in shards on all ranks, with the values that one learner's have."""
        import deepspeed
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        zero = {"stage": 3}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = model_class(self.config)
        torch.manual_seed(sync.SEED)
        for parameter in model.parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.rank == 0:
                    sync.fill(parameter)
        small = DeepSpeedZeroConfig(**zero).param_persistence_threshold
        whole = [parameter for parameter in model.parameters() if parameter.ds_numel <= small]
        whole[0].all_gather(param_list=whole)
        self.whole = set(map(id, whole))
        return model

    def gather(self, parameters: list):
        """What a training run gathers with; nothing for parameters that are whole already."""
        return nullcontext() if all(id(parameter) in self.whole for parameter in parameters) else self.gathered(parameters)

    def push(self, fingerprint: bool = False) -> dict:
        """Rank 0 publishes and measures; the others gather along. {} from them."""
        self._begin()
        if self.rank == 0:
            metrics = super().push(fingerprint)
            return metrics | {"sync/gather_ms": self.gathered.seconds * 1e3}
        for _ in self.tensors():
            pass
        return {}

    def quantize_only(self) -> float:
        self._begin()
        return super().quantize_only()

    def gather_only(self) -> float:
        """ms to gather everything that is published, neither quantized nor sent."""
        self._begin()
        parameters = dict(self.model.named_parameters())
        started = time.perf_counter()
        for _, names in self.parts():
            for name in names:
                with self.gather([parameters[name]]):
                    pass
        self._wait()
        return (time.perf_counter() - started) * 1e3

    def _begin(self) -> None:
        """All ranks start at once: Ray's calls reach them milliseconds apart."""
        self._wait()
        dist.barrier()
        self.gathered.seconds = 0.0


class Learners:
    """The ranks as the driver sees them; of one rank, a plain ``Learner``, which shards and gathers nothing."""

    def __init__(self, *args, ranks: int, gpus: float, device: str):
        """args: ``Learner``'s. gpus: of each rank. Returns at once; ``connect`` waits."""
        cls = sync.Learner if ranks == 1 else LearnerRank
        worker = ray.remote(cls).options(num_gpus=gpus, num_cpus=0)
        if ranks == 1:
            self.actors = [worker.remote(*args, device=device)]
        else:
            self.actors = [worker.remote(rank, ranks) for rank in range(ranks)]
        self.settings = (args, device)

    def connect(self, *args) -> None:
        """Build the model; args: ``Learner.connect``'s (rank 0 publishes)."""
        if len(self.actors) > 1:
            given, device = self.settings
            place = ray.get(self.actors[0].meeting_point.remote())
            answers([actor.join.remote(*place, *given, device=device) for actor in self.actors])
        ray.get(self.actors[0].connect.remote(*args))

    def push(self, fingerprint: bool = False) -> dict:
        """Rank 0's metrics of one publish."""
        return answers([actor.push.remote(fingerprint) for actor in self.actors])[0]

    def quantize_only(self) -> float:
        """ms, of the slowest rank."""
        return max(answers([actor.quantize_only.remote() for actor in self.actors]))

    def gather_only(self) -> float:
        """ms, of the slowest rank; nothing of a single one."""
        if len(self.actors) == 1:
            return 0.0
        return max(answers([actor.gather_only.remote() for actor in self.actors]))

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def answers(calls: list) -> list:
    """Of all ranks; the first that fails ends the wait, since the others may be in a collective call with it."""
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending)
        ray.get(done)
    return ray.get(calls)
