"""vLLM plugin (``vllm.general_plugins``): vLLM calls :func:`register` in every process it starts."""


def register() -> None:
    """Make the quantization method and the weight-transfer backend "qarl" known to vLLM. May be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import quantization

    from qarl_openrlhf.engine.cpu_method import METHOD, QarlConfig
    from qarl_openrlhf.patches import vllm as patch

    patch.apply()

    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(QarlConfig)
    if "qarl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("qarl", "qarl_openrlhf.sync.receiver", "QarlWeightTransfer")
