"""A run that Ray ended because a node's main memory was nearly full ends in an error that says what filled it."""

import re

import ray

LARGEST = 4
WHAT_HELPS = (
    "end what else runs there; what --dry_run counts in main memory (--ds.adam_offload, --ds.enable_sleep and"
    " --vllm.enable_sleep put it there); fewer --vllm.num_engines"
)


class MainMemoryError(RuntimeError):
    """Names the node, how full it was, what Ray ended, the largest processes there, and what helps."""


def ended_for_memory(error: Exception) -> MainMemoryError | None:
    """Of a run that ended in ``error``: its own text tells it, or the death of one of the run's actors; None if neither does."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return MainMemoryError(explain(str(error)))
    job = ray.get_runtime_context().get_job_id()
    for actor in ray._private.state.actors().values():
        cause = actor.get("DeathCause")
        if actor.get("JobID") == job and cause is not None and cause.HasField("oom_context"):
            return MainMemoryError(explain(cause.oom_context.error_message))
    return None


def explain(text: str) -> str:
    """Ray's message, some 3,000 characters, in one line; what is not found in it is left out.

    >>> explain("... on the node (IP: 10.0.0.1, ID: ab) was 119.72GB / 125.87GB (0.95), which exceeds the memory usage threshold of 0.95")
    "main memory of node 10.0.0.1 was nearly full (119.72 of 125.87 GB; Ray's limit is 95 %) and Ray ended a process of the run. ..."
    """
    found = re.search(r"\(IP: ([^,]+),[^)]*\) was ([\d.]+)GB / ([\d.]+)GB", text)
    limit = re.search(r"threshold of ([\d.]+\d)", text)
    full = f" of node {found[1]} was nearly full ({found[2]} of {found[3]} GB" if found else " was nearly full"
    if found:
        full += f"; Ray's limit is {100 * float(limit[1]):.0f} %)" if limit else ")"
    ended = re.search(r"task name=([\w.]+).*?pid=(\d+)", text)
    line = f"main memory{full} and Ray ended {f'{ended[1]} (pid {ended[2]})' if ended else 'a process'} of the run."
    largest = re.findall(r"(\d+)\t([\d.]+)\t([^,\t\n]+)", text)[:LARGEST]
    if largest:
        line += " Largest there: " + ", ".join(f"{command.strip()} (pid {pid}) {size} GB" for pid, size, command in largest) + "."
    return f"{line} What helps: {WHAT_HELPS}. RAY_memory_usage_threshold=0.98 moves Ray's limit"
