"""Training checkpoints that are whole or not there at all, and everything that a run needs to go on bit for bit.

DeepSpeed writes the weights and the optimizer. Around it: a checkpoint is written under another name, checksummed and then
renamed (``write``); a resume takes the newest one that is whole (``find``); random state, weight version and the moving
average, which DeepSpeed does not know, are in a file a rank (``state``).
"""
