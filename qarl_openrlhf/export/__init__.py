"""A learner, or a checkpoint of its training, as a directory that `vllm serve` loads."""
