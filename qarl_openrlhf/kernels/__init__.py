"""Low-bit arithmetic: torch references, and one dispatch."""

MAX_ROW = 32768  # input features that the Triton kernels of whole rows hold in registers; here, as they import Triton
