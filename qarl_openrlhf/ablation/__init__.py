"""Many training runs that differ in objective, scheme and seed: planned, run one by one, resumed, compared."""
