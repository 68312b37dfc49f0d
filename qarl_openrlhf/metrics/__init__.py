"""What a run reports: sums over micro-batches and ranks, the families of metrics, and where they are written."""
