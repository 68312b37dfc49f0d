"""The rollout engine: vLLM running the learner's low-bit weights."""
