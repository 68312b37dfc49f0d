"""What goes wrong with checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read. The message names the directory and says what would work."""
