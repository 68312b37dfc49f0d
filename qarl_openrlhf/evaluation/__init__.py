"""Benchmarks: sets of problems, k sampled answers each, scores, and the table of several runs."""
