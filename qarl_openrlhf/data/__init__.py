"""Models and prompt sets that need no network: the SmolLM2 converter, small Qwen3 models, reasoning-gym data sets."""
