"""Low-bit arithmetic: torch references, and one dispatch."""
