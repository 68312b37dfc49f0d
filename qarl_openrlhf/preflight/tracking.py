"""wandb, where it is asked for: its server answers, or it is told to do without."""

from qarl_openrlhf.config import ConfigError
from qarl_openrlhf.preflight.hub import reachable

WITHOUT = "WANDB_MODE=offline in front of the command keeps everything on this machine's disk (`wandb sync` sends it later)"
NOT_ONLINE = ("offline", "dryrun", "disabled")


def check_wandb(args) -> None:
    """ConfigError for ``--logger.wandb.key`` where wandb would look for its server until it gives up, after the engines' start."""
    if not args.logger.wandb.key:
        return
    try:
        import wandb

        settings = wandb.setup().settings  # the environment's, and those of `wandb offline` and `wandb login`
        wandb.teardown()
    except ImportError:
        raise ConfigError("--logger.wandb.key needs the package wandb, which is not installed: install it, or drop the flag") from None
    except Exception as error:  # a setting that it does not know
        raise ConfigError(f"--logger.wandb.key: wandb does not start: {' '.join(str(error).split())}") from None
    if settings.mode not in NOT_ONLINE and not reachable(settings.base_url):
        raise ConfigError(f"--logger.wandb.key: {settings.base_url} is not reachable: {WITHOUT}; or drop the flag")
