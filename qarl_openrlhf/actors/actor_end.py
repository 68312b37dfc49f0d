"""A run one of whose processes ended by itself ends in an error that says which and how, not in Ray's about an actor."""

import re

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qarl_openrlhf.actors.main_memory_end import WHAT_HELPS
from qarl_openrlhf.rewards.process_end import ProcessEnd, read_end


class ActorProcessError(RuntimeError):
    """A process of the run ended by itself. Names what it was, its pid and host, the exit code or signal, the likely cause and the log."""


def ended_actor(names: dict[str, str], args, *, earlier: frozenset[str] = frozenset()) -> ActorProcessError | None:
    """Of the first of the run's actors whose process ended by itself; None if none did.

    names: what the error calls an actor ("engine 0"), by its id in hex or, for those whose handle nobody has, by the name of its class.
    earlier: ids of the actors of runs before in this process.
    """
    job = ray.get_runtime_context().get_job_id()
    dead = []
    for actor in ray._private.state.actors().values():
        if actor["JobID"] != job or actor["ActorID"] in earlier:
            continue
        if (name := names.get(actor["ActorID"], names.get(actor["ActorClassName"]))) and _by_itself(actor):
            dead.append((actor["EndTime"], name, actor))
    if not dead:
        return None
    _, name, actor = min(dead, key=lambda one: one[0])  # what follows it into the end is not the cause
    files = local_files(args) if name.startswith("engine") else []
    end = _end(actor, files)
    message = f"{name}: its process (pid {actor['Pid']} on {actor['Address']['IPAddress']}) "
    asked = re.search(r"receives a (SIG\w+)", actor["DeathCause"].actor_died_error_context.error_message)
    if end.what:
        message += f"ended by itself with {end.what}."
    elif asked:
        message += f"was ended by {asked[1]}."
    else:
        message += "ended without a word: by SIGKILL (the kernel's for want of main memory, or someone's), or a C library called exit."
    if files and not asked:
        message += (
            f" {', '.join(files)} runs in that process: code that ends it (os._exit, a crash of a C extension) is the likely"
            " cause; return a reward of 0, or raise, instead."
        )
    if not end.what and not asked:
        message += f" What helps where main memory was full (dmesg on that host tells): {WHAT_HELPS}."
    return ActorProcessError(message.removesuffix(".") + (f". Log of the process: {end.log}" if end.log else ""))


def _by_itself(actor: dict) -> bool:
    """Not those that Ray ended, nor those whose node died or that failed to start with an error: Ray's message says so."""
    return actor["State"] == "DEAD" and actor["DeathCause"].actor_died_error_context.reason == ActorDiedErrorContext.WORKER_DIED


def local_files(args) -> list[str]:
    """The user's Python files that an engine's process runs: rewards or an agent."""
    if args.train.agent_func_path:
        return [args.train.agent_func_path]
    return [entry for entry in args.reward.remote_url or [] if entry.endswith(".py")]


def _end(actor: dict, files: list[str]) -> ProcessEnd:
    node = NodeAffinitySchedulingStrategy(actor["Address"]["NodeID"], soft=False)
    try:
        reader = ray.remote(read_end).options(num_cpus=0, scheduling_strategy=node)
        return ray.get(reader.remote(actor["Pid"], files), timeout=60)
    except (ray.exceptions.RayError, TimeoutError):  # the node is gone or busy: the error is told without its log
        return ProcessEnd(None, None)
