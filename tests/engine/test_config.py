"""What vLLM is started with, state by state and device by device, without starting it."""

import asyncio

import pytest
import ray
import torch
from vllm import AsyncEngineArgs

from qarl_openrlhf.engine import plugin
from qarl_openrlhf.engine.config import engine_overrides
from qarl_openrlhf.engine.state import EngineNotReady, WeightState
from qarl_openrlhf.quant import QuantError, QuantScheme
from qarl_openrlhf.sync.publisher import Publisher

from . import tiny


def overrides(scheme: str, device: str = "cpu", tp: int = 1) -> dict:
    return engine_overrides(QuantScheme.parse(scheme), model="some/model", device=device, tensor_parallel_size=tp)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w4a16:g32", "w8a8", "w4a16:g64:rollout"])
def test_cpu_engines_run_our_method_with_dummy_weights(scheme, tmp_path):
    plugin.register()
    tiny.make_learner("llama", "bf16", tmp_path)
    args = overrides(scheme)
    assert args["load_format"] == "dummy"
    config = AsyncEngineArgs(model=str(tmp_path), dtype="bfloat16", **args).create_engine_config()
    assert config.model_config.quantization == "qarl"
    assert config.quant_config.scheme == QuantScheme.parse(scheme)
    assert config.weight_transfer_config.backend == "qarl"
    assert config.model_config.logprobs_mode == "processed_logprobs"
    # one process less than "mp", which vLLM would make of "uni"
    assert "UniProcExecutor" in str(config.parallel_config.distributed_executor_backend)
    assert overrides(scheme, tp=2)["distributed_executor_backend"] == "mp"


@pytest.mark.parametrize("scheme", ["fp8", "w4a8"])
def test_schemes_without_a_cpu_engine_are_refused_with_the_reason(scheme):
    with pytest.raises(QuantError, match=f"{scheme}.* has no CPU engine for some/model.*use w4a16 or w8a8"):
        overrides(scheme)


def test_gpu_engines_run_vllms_own_kernels():
    for scheme in ("w4a16:g64", "w8a8", "fp8", "w4a8"):
        args = overrides(scheme, "cuda")
        injected = args["hf_overrides"]["quantization_config"]
        assert injected == QuantScheme.parse(scheme).quantization_config(["lm_head", r"re:.*\.(shared_expert_)?gate$"])
        assert injected["quant_method"] == "compressed-tensors"
        assert "quantization" not in args and "distributed_executor_backend" not in args
        assert args["load_format"] == "dummy"
        eight_bit_float = scheme in ("fp8", "w4a8")
        assert ("+quant_fp8" in args.get("compilation_config", {}).get("custom_ops", [])) == eight_bit_float
    assert "hf_overrides" not in overrides("bf16", "cuda")


def test_a_layer_that_does_not_fit_is_named_when_the_engine_is_built():
    from qarl_openrlhf.engine.cpu_method import QarlLinearMethod

    method = QarlLinearMethod(QuantScheme.parse("w4a16"), "model.layers.0.mlp.down_proj")
    layer = type("Layer", (), {"tp_size": 1})()
    with pytest.raises(QuantError, match="down_proj .*w4a16:g64"):
        method.create_weights(layer, 192, [128], 192, 128, None, weight_loader=None)


def test_a_layer_that_a_checkpoint_leaves_unquantized_is_named_and_not_read_as_codes(monkeypatch):
    """An export with --skip, evaluated with --engine qarl: BF16 weights in int8 parameters would be zeros, without a word."""
    from qarl_openrlhf.engine.cpu_method import QarlLinearMethod

    for what, value in (("rank", 0), ("world_size", 1)):  # vLLM's parameters ask for them
        monkeypatch.setattr(f"vllm.model_executor.parameter.get_tensor_model_parallel_{what}", lambda value=value: value)
    name, taken = "model.layers.0.self_attn.qkv_proj", []
    method = QarlLinearMethod(QuantScheme.parse("w8a8"), name)
    weight = method.parameters([32, 16, 16], 64, torch.bfloat16, lambda parameter, *loaded: taken.append(loaded))["weight"]
    codes = torch.ones(16, 64, dtype=torch.int8)
    weight.weight_loader(weight, codes, "k")
    assert taken == [(codes, "k")]
    with pytest.raises(QuantError, match=f"{name}: the checkpoint has a weight of torch.bfloat16"):
        weight.weight_loader(weight, codes.bfloat16(), "k")
    assert len(taken) == 1


def test_experts_of_another_form_are_refused_by_layer_name():
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from qarl_openrlhf.engine.moe_method import CpuMoEMethod

    layer = SimpleNamespace(
        moe_config=SimpleNamespace(has_bias=False),
        scoring_func="sigmoid",
        use_grouped_topk=True,
        custom_routing_function=None,
        e_score_correction_bias=None,
        routed_scaling_factor=1.0,
        apply_router_weight_on_input=False,
        activation=MoEActivation.SILU,
        use_ep=False,
    )
    with pytest.raises(QuantError, match="model.layers.3.mlp.experts: .* with scoring function sigmoid, grouped top-k routing have"):
        CpuMoEMethod(QuantScheme.parse("w4a16"), layer, "model.layers.3.mlp.experts")


def test_states():
    async def check():
        state = WeightState()

        async def refused(*words):
            with pytest.raises(EngineNotReady) as caught:
                await state.wait_ready("engine 7", 0.05)
            assert all(word in str(caught.value) for word in ("engine 7", *words))

        await refused("EMPTY", "nothing has been published")
        state.begin(1)
        await refused("UPDATING", "version 1")
        with pytest.raises(RuntimeError, match="another one is under way"):
            state.begin(2)
        state.fail("a tensor is missing")
        state.fail("a consequence")
        await refused("FAILED", "a tensor is missing")
        with pytest.raises(RuntimeError, match="FAILED"):
            state.complete(1)
        state.begin(2)  # healing: the weights before it are no fall-back
        await refused("UPDATING")
        with pytest.raises(RuntimeError, match="update 1 finished"):
            state.complete(1)  # a late answer of the update before
        state.complete(2)
        await state.wait_ready("engine 7", 0.05)
        assert state.version == 2
        state.begin(3)  # a live engine: requests wait for the end of the update
        waiting = asyncio.create_task(state.wait_ready("engine 7", 10))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        state.complete(3)
        failures = await waiting
        state.begin(4)
        await refused("UPDATING")  # but not for ever
        waiting = asyncio.create_task(state.wait_ready("engine 7", 10))
        await asyncio.sleep(0.02)
        state.fail("broken")
        with pytest.raises(EngineNotReady, match="broken"):
            await waiting
        with pytest.raises(EngineNotReady, match="engine 7 aborted a request.*broken"):
            state.require_whole("engine 7", failures)  # of a request that was let in before it broke
        state.begin(5)
        state.complete(5)
        with pytest.raises(EngineNotReady, match="another one has been published since"):
            state.require_whole("engine 7", failures)
        state.require_whole("engine 7", await state.wait_ready("engine 7", 10))

    asyncio.run(check())


def test_ray_knows_the_actor_class_by_its_own_name():
    """Under OpenRLHF's name, a process that looks an engine up by name could not start another engine."""
    from qarl_openrlhf.engine.actor import QarlRolloutActor

    ray_class = ray.remote(QarlRolloutActor).__ray_metadata__
    descriptor = ray_class.actor_creation_function_descriptor
    assert descriptor.module_name == "qarl_openrlhf.engine.actor"
    assert descriptor.class_name == "QarlRolloutActor"


@pytest.mark.parametrize("argument", [{"transport": "post"}, {"verify": "sometimes"}])
def test_unknown_publisher_options_are_refused(argument):
    with pytest.raises(ValueError, match="does not exist: use"):
        Publisher([], **argument)
