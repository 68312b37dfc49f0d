"""Where a run lives: the device, the process environment, the Ray cluster and the resources asked of it."""

import logging
import math
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PLACEMENT_TIMEOUT_S = 60

# Set before Ray starts, since Ray workers inherit the environment of the Ray head, not of the driver. Each entry says why.
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM's sampler and DeepSpeed call torch.compile even in eager mode: minutes of g++
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would give learner and engine the same core
    # On a CPU with AMX vLLM would quantize the activations of a w4a16 checkpoint to 8 bits, unasked.
    "VLLM_CPU_INT4_W4A8": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_WAIT_POLICY": "PASSIVE",  # learner and engine take turns on the same cores: no spinning while the other works
    "KMP_BLOCKTIME": "0",
    # Activations of a few MB come and go with every layer: keep their pages instead of asking the kernel for zeroed ones.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
COMMON_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",  # a busy machine of two cores takes more than Ray's 30 s
    # Ray runs workers at nice 15: beside as many busy processes as there are cores they stand still, a start that takes 8 s took 45.
    "RAY_worker_niceness": "0",
    # Zero-copy tensors out of the object store are read-only, and torch warns at every one of them.
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0",
}


# What a user sets in the shell of the driver and expects in every worker, also on a cluster that was started before.
PASSED_ON = ("WANDB_", "HF_", "NCCL_", "VLLM_", "CUDA_LAUNCH_BLOCKING")


_groups: list = []


class ResourceError(RuntimeError):
    """The cluster cannot give what the run needs. The message names the resource, the need and what is there."""


def resolve_device(requested: str) -> str:
    """"auto" -> "cuda" where a GPU is visible, else "cpu"; asking for "cuda" without one is an error."""
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ResourceError("--device cuda, but torch sees no CUDA device; use --device cpu, or a CUDA build of torch")
    return requested


def set_environment(device: str, threads: int | None = None) -> dict[str, str]:
    """Fill in what the user has not set; returns that and ``PASSED_ON``, for the Ray workers of an existing cluster."""
    wanted = dict(COMMON_ENVIRONMENT)
    if device == "cpu":
        wanted |= CPU_ENVIRONMENT
        wanted["OMP_NUM_THREADS"] = str(threads or available_cpus())
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(PASSED_ON)}


def free_port() -> int:
    """A TCP port of this host that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def cuda_device_count() -> int:
    """GPUs of this host, whatever CUDA_VISIBLE_DEVICES shows of them; no CUDA context is made."""
    directory = "/proc/driver/nvidia/gpus"
    return len(os.listdir(directory)) if os.path.isdir(directory) else 0


def available_cpus() -> int:
    """Cores this process may use: those it may run on, and no more than its container's quota pays for."""
    return max(1, min(len(os.sched_getaffinity(0)), cpu_quota()))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that the container may use; infinite without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):  # cgroups of the first version, or none
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return math.inf
    return math.ceil(int(quota) / int(period)) if quota.strip() not in ("max", "-1") else math.inf


@dataclass(frozen=True)
class ResourcePlan:
    """GPUs (logical ones on a CPU machine) asked of Ray, by role."""

    by_role: dict[str, int]

    @property
    def gpus(self) -> int:
        return sum(self.by_role.values())

    @classmethod
    def of(cls, args) -> "ResourcePlan":
        """The bundles OpenRLHF's ``train`` will ask for with these (resolved) arguments."""

        def size(group) -> int:
            return group.num_nodes * group.num_gpus_per_node

        roles: dict[str, int] = {"actor": size(args.actor)}
        shared = args.train.colocate_all or args.train.colocate_actor_ref
        if args.algo.kl.init_coef > 0:
            roles["reference"] = 0 if shared else size(args.ref)
        if args.critic.model_name_or_path:
            roles["critic"] = 0 if args.train.colocate_all else size(args.critic)
        if not args.reward.remote_url:
            with_critic = args.critic.model_name_or_path and args.train.colocate_critic_reward
            roles["reward"] = 0 if args.train.colocate_all or with_critic else size(args.reward)
        if args.vllm.num_engines:
            hybrid = args.train.colocate_all and not args.train.async_enable
            roles["engines"] = 0 if hybrid else args.vllm.num_engines * args.vllm.tensor_parallel_size
        return cls(roles)

    def describe(self, device: str) -> str:
        """ "8 GPUs (actor 4, engines 4)"; on a CPU each is a process."""
        return str(self) if device != "cpu" else str(self).replace("GPUs", "processes on the CPU", 1)

    def __str__(self) -> str:
        parts = ", ".join(f"{role} {n or 'shared'}" for role, n in self.by_role.items())
        return f"{self.gpus} GPUs ({parts})"


def start_ray(
    device: str, plan: ResourcePlan, environment: dict[str, str], *, log_to_driver: bool, timeout_s: float = PLACEMENT_TIMEOUT_S
) -> None:
    """Join the cluster of ``RAY_ADDRESS`` / the job's own, or start a head in this process' own session.

    A head started here ends with this process. On a CPU machine it has as many logical GPUs as the plan needs.
    Raises ``ResourceError`` at once when an existing cluster is too small, after ``timeout_s`` when it is occupied.
    """
    import ray

    from qarl_openrlhf.preflight.ports import require_ray_head
    from qarl_openrlhf.preflight.shared_memory import object_store

    common = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            require_ray_head(os.environ["RAY_ADDRESS"])
            ray.init(address="auto", runtime_env={"env_vars": environment}, **common)
        else:
            # Workers of a head started here inherit this process' environment. One Python process a logical CPU, started
            # in advance and for nothing, would take the cores away from the actors.
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
            # Experience batches are small.
            store, directory = object_store(smallest=80 * 2**20, largest=2 * 2**30, on_disk=_ray_directory())
            logical = {"num_gpus": plan.gpus, "num_cpus": plan.gpus + 8} if device == "cpu" else {}
            ray.init(
                address="local",
                include_dashboard=False,
                **common,
                object_store_memory=store,
                _plasma_directory=directory,
                _temp_dir=_ray_directory(),
                **logical,
            )
    _wait_for_room(device, plan, timeout_s)


def _wait_for_room(device: str, plan: ResourcePlan, timeout_s: float) -> None:
    """Actors without a placement group wait for ever for a resource that never comes free: better an error, now."""
    import ray

    need = {"GPU": plan.gpus, "CPU": plan.gpus + 1}  # a CPU for each, and one for the controller
    deadline = time.monotonic() + timeout_s
    while True:
        free, total = ray.available_resources(), ray.cluster_resources()
        short = [name for name, amount in need.items() if free.get(name, 0) < amount]
        if not short:
            return
        if any(total.get(name, 0) < need[name] for name in short) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    logical = " (logical ones: `ray start --num-gpus N --num-cpus M`)" if device == "cpu" else ""
    figures = "; ".join(f"{n}: {need[n]:g} needed, {total.get(n, 0):g} in the cluster, {free.get(n, 0):g} free" for n in short)
    raise ResourceError(
        f"this run needs {plan}, which the Ray cluster does not have{logical}: {figures}. Lower --actor.num_gpus_per_node, "
        "--ref.num_gpus_per_node or --vllm.num_engines, pass --train.colocate_all, or wait for the other jobs to end"
    )


def _ray_directory() -> str:
    """Ray's sockets live below it and a socket path has at most 107 characters: a short directory of this user's."""
    return os.path.join(tempfile.gettempdir(), f"qarl-ray-{os.getuid()}")


def release_placement_groups() -> None:
    """Give back what ``placement_group`` reserved: Ray keeps it until the driver ends, not until its actors do."""
    from ray.util import remove_placement_group

    while _groups:
        remove_placement_group(_groups.pop())


def placement_group(bundles: list[dict], strategy: str = "PACK", timeout_s: float = PLACEMENT_TIMEOUT_S):
    """A ready placement group; ``ResourceError`` naming need and supply when it can't be met in ``timeout_s`` seconds."""
    import ray
    from ray.util import placement_group as make
    from ray.util import remove_placement_group

    group = make(bundles, strategy=strategy)
    if group.wait(timeout_seconds=timeout_s):
        _groups.append(group)
        return group
    remove_placement_group(group)
    need: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            need[name] = need.get(name, 0) + amount
    free = ray.available_resources()
    short = [f"{name}: {n:g} needed, {free.get(name, 0):g} free" for name, n in need.items() if free.get(name, 0) < n]
    raise ResourceError(
        f"no room for {len(bundles)} bundles after {timeout_s:g} s ({'; '.join(short) or f'{need} in strategy {strategy}'})"
    )
