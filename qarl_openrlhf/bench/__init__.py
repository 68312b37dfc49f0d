"""Kernel benchmarks, one family a file; ``python -m qarl_openrlhf.cli.bench_kernels`` runs them."""
