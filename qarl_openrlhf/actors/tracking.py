"""A wandb that does not start is one line of the run."""

from openrlhf.utils.logging_utils import WandbLogger

from qarl_openrlhf.preflight.tracking import WITHOUT


class TrackingError(RuntimeError):
    """wandb refused what it was given, or its server went away. Names the flag and how to do without."""


class QarlWandbLogger(WandbLogger):
    def __init__(self, args):
        try:
            super().__init__(args)
        except Exception as error:  # a wrong key, an unknown organisation, a time-out: classes of its own
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise TrackingError(f"--logger.wandb.key: wandb does not start: {what}; {WITHOUT}; or drop the flag") from None
