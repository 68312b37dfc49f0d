"""Models and prompt sets that need no network: the SmolLM2 converter and reasoning-gym data sets."""
