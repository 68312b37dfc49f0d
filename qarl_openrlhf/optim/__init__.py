"""Optimizers that DeepSpeed has not, or not right, behind its interface."""
