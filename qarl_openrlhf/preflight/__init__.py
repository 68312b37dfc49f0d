"""Before Ray starts: are the files of a run there and usable? Seconds here, instead of minutes and a worker's traceback later."""

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight import directories, model_files, prompts, python_files, shared_memory, tracking

CHECKS = (
    prompts.check_prompts,
    python_files.check_reward,
    python_files.check_agent,
    model_files.check_model,
    model_files.check_critic_and_reward_model,
    directories.check_directories,
    shared_memory.check_shared_memory,
    tracking.check_wandb,
)


def preflight(args) -> list[str]:
    """Why the run would fail on its files, one message a check; empty if nothing was found. Names on the hub are left to the hub."""
    problems = []
    for check in CHECKS:
        try:
            check(args)
        except ConfigError as error:
            problems.append(str(error))
    return problems
