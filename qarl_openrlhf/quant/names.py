"""Names by which the layers of a decoder model are told apart: what a learner quantizes, an engine does, and Muon updates."""

import re

DECODER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
ROUTER_GATES = ("gate", "shared_expert_gate")  # never quantized; vLLM runs them unquantized, too
PROJECTIONS = ("gate_up_proj", "down_proj")  # the stacked weights of a block of experts
