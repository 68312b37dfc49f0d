"""vLLM's names that moved between 0.26 and 0.29; nothing is changed here."""

try:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
except ImportError:  # before 0.29 one class held weights and routing
    from vllm.model_executor.layers.fused_moe import FusedMoE as RoutedExperts

__all__ = ["RoutedExperts"]
