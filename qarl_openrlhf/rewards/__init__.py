"""Reward files for OpenRLHF's `--reward.remote_url FILE.py`: each defines `reward_func(queries, prompts, labels)`."""
