"""Is this machine ready to train, and if not, which command mends it. Probing (machine.py) and judging are apart."""
