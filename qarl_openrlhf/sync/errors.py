"""Errors of a weight update. Every message names the tensor or the engine it is about."""


class SyncError(RuntimeError):
    """A weight update that did not happen; the engines refuse to generate until a later one succeeds."""


class ManifestError(SyncError):
    """A bucket that does not hold what its manifest says, or tensors that are not what the engine's model expects."""
