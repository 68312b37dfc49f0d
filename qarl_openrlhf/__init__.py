"""QaRL on OpenRLHF: reinforcement learning of language models with a low-bit rollout engine and a learner whose forward
reads the very same low-bit weights (Rollout-Aligned Quantization-Aware RL, arXiv 2604.07853)."""

__version__ = "0.1.0"
