"""A run whose engine's process ended by itself ends in an error that says how, not in Ray's about an actor."""

import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from qarl_openrlhf.rewards.process_end import ProcessEnd, describe, read_end


class EngineProcessError(RuntimeError):
    """An engine's process ended by itself. Names the engine, the exit code, the likely cause and the log."""


def ended_engine(engines: list, args) -> EngineProcessError | None:
    """Of the first engine whose actor's process ended by itself; None if none did. engines: Ray handles, in their order."""
    files = local_files(args)
    for number, engine in enumerate(engines):
        actor = ray._private.state.actors(engine._actor_id.hex())
        # Not those that Ray ended, nor those whose node died or that failed to start with an error: Ray's message says so.
        if actor.get("State") != "DEAD":
            continue
        if actor["DeathCause"].actor_died_error_context.reason != ActorDiedErrorContext.WORKER_DIED:
            continue
        end = _end(actor, files)
        message = f"engine {number}: its process (pid {actor['Pid']}) ended by itself with {end.what}."
        if files:
            message += (
                f" {', '.join(files)} runs in that process: code that ends it (os._exit, a crash of a C extension) is the"
                " likely cause; return a reward of 0, or raise, instead"
            )
        return EngineProcessError(message + (f". Log of the process: {end.log}" if end.log else ""))
    return None


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
        return ProcessEnd(describe("", files), None)
