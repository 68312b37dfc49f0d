"""A patch whose target is gone raises, naming it, and so does one of a version that it was not written for."""

import ast
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as N

import pytest
import torch

from qarl_openrlhf import patches
from qarl_openrlhf.patches import PatchError, replacing, versions, vllm_cpu

PACKAGE = Path(patches.__file__).parent
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="mends packages on machines without CUDA")


def ours(name: str) -> ModuleType:
    return importlib.import_module(f"qarl_openrlhf.patches.{name}")


def use_ray():
    with ours("ray").own_sigterm_handler():
        pass


def use_vllm_cpu():
    with vllm_cpu.answering_for_vllm():
        pass


def keep_experts():
    ours("liger").keep_experts(N(ds=N(use_liger_kernel=True)))


@pytest.fixture
def liger(monkeypatch):
    """Liger's module and function table, which no lock installs."""
    made = [ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")]
    made[-1].MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3_moe": lambda **_: None, "llama": "not touched"}
    for parent, child in zip([None, *made], made, strict=False):
        monkeypatch.setitem(sys.modules, child.__name__, child)
        if parent:
            setattr(parent, child.__name__.rpartition(".")[2], child)
    found = versions.version
    for module in (versions, replacing):
        monkeypatch.setattr(module, "version", lambda name: "0.8.5" if name == "liger-kernel" else found(name))
    return made[-1]


def at(patch: str, apply, *targets: str, cpu: bool = True):
    marks = [without_cuda] if cpu else []
    return [pytest.param(apply, targets, target, id=f"{patch}: {target.rpartition('.')[2]}", marks=marks) for target in targets]


EXPERIENCE = [f"openrlhf.trainer.ppo_utils{m}:Experience" for m in ("", ".experience", ".experience_maker", ".samples_generator")]
TARGETS = [
    *at(
        "deepspeed",
        lambda: ours("deepspeed").apply(),
        "deepspeed.comm.torch:build_shm_op",
        "deepspeed.runtime.zero.partition_parameters:Init._allgather_params_coalesced",
        "deepspeed.comm:all_gather_into_tensor",
    ),
    *at(
        "openrlhf",
        lambda: ours("openrlhf").apply(),
        "openrlhf.trainer.ppo_utils.replay_buffer:NaiveReplayBuffer.__init__",
        "openrlhf.utils.deepspeed.deepspeed:init_device_mesh",
    ),
    *at(
        "openrlhf",
        lambda: ours("openrlhf").apply(),
        "openrlhf.trainer.ray.launcher:placement_group",
        "openrlhf.trainer.ray.vllm_engine:placement_group",
        cpu=False,
    ),
    *at("openrlhf_experience", lambda: ours("openrlhf_experience").apply(), *EXPERIENCE, cpu=False),
    *at("ray", use_ray, "ray._private.utils:set_sigterm_handler", cpu=False),
    *at(
        "torch_cuda",
        lambda: ours("torch_cuda").apply(),
        *(f"torch.cuda:{name}" for name in ("current_device", "set_device", "synchronize", "empty_cache", "current_stream")),
    ),
    *at("vllm_cpu", use_vllm_cpu, "importlib.metadata:version", cpu=False),
    *at("zero3_loading", lambda: ours("zero3_loading").apply(), "transformers.modeling_utils:_load_state_dict_into_zero3_model", cpu=False),
    *at(
        "vllm",
        lambda: ours("vllm").apply(),
        "vllm.v1.sample.ops.topk_topp_sampler:compiled_random_sample",
        "vllm.model_executor.layers.fused_moe.router.fused_topk_router:vllm_topk_softmax",
    ),
    *at(
        "vllm_experts",
        lambda: ours("vllm_experts").apply(),
        "vllm.model_executor.layers.fused_moe.oracle.int_wna16:marlin_moe_permute_scales",
        "vllm._custom_ops:gptq_marlin_moe_repack",
        cpu=False,
    ),
    *at(
        "vllm_w4a8",
        lambda: ours("vllm_w4a8").apply(),
        "vllm._custom_ops:cutlass_pack_scale_fp8",
        "vllm._custom_ops:cutlass_encode_and_reorder_int4b",
        "vllm._custom_ops:cutlass_encode_and_reorder_int4b_grouped",
        "vllm.model_executor.layers.quantization.utils.quant_utils:convert_packed_uint4b8_to_signed_int4_inplace",
        "vllm.model_executor.kernels.linear.mixed_precision.cutlass:convert_packed_uint4b8_to_signed_int4_inplace",
        cpu=False,
    ),
]


def place(target: str):
    """"module:Class.name" -> (module or class, "name")."""
    module, _, path = target.partition(":")
    owner = pytest.importorskip(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


@pytest.mark.parametrize("apply, all_of_it, target", TARGETS)
def test_a_target_that_is_gone_is_named(monkeypatch, apply, all_of_it, target):
    patches.apply()  # OpenRLHF cannot be imported without
    for owner, name in map(place, all_of_it):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone afterwards
    owner, name = place(target)
    monkeypatch.delattr(owner, name)
    module = getattr(owner, "__module__", None) or owner.__name__
    for _ in range(2):  # and not passed over by the next call
        with pytest.raises(PatchError, match=rf"{module}.* has no {name}, which qarl_openrlhf's patch needs") as error:
            apply()
    package = module.partition(".")[0]
    if package != "importlib":
        assert any(f"tested with {d}{versions.SUPPORTED[d]}" in str(error.value) for d in (package, f"{package}-cpu") if d in versions.SUPPORTED)


@pytest.mark.parametrize("any_version", [True, False])
def test_a_vllm_on_gpus_without_the_experts_functions(monkeypatch, any_version):
    """Refused, unless QARL_ANY_VLLM takes any: then a dense model still runs."""
    owner, name = place("vllm._custom_ops:gptq_marlin_moe_repack")
    scales = place("vllm.model_executor.layers.fused_moe.oracle.int_wna16:marlin_moe_permute_scales")
    monkeypatch.setattr(*scales, getattr(*scales))
    monkeypatch.delattr(owner, name)
    monkeypatch.setenv("QARL_ANY_VLLM", str(int(any_version)))
    monkeypatch.setattr(versions, "version", lambda package: "0.29.0")
    platform = type(place("vllm.platforms:current_platform")[0].current_platform)
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(platform, f"is_{kind}", lambda self, kind=kind: kind == "cuda")
    with nullcontext() if any_version else pytest.raises(PatchError, match=name):
        ours("vllm").apply()


def test_ligers_table_and_its_family(liger, monkeypatch):
    table = liger.MODEL_TYPE_TO_APPLY_LIGER_FN
    keep_experts()
    first = table["qwen3_moe"]
    keep_experts()
    assert table["qwen3_moe"] is first and first.keywords == {"swiglu": False, "fused_linear_cross_entropy": False}
    monkeypatch.delitem(table, "qwen3_moe")
    with pytest.raises(PatchError, match=r"monkey_patch has no qwen3_moe.*liger-kernel 0\.8\.5 is installed.*tested with liger-kernel>=0\.8\.5,<0\.9"):
        keep_experts()
    monkeypatch.delattr(liger, "MODEL_TYPE_TO_APPLY_LIGER_FN")
    with pytest.raises(PatchError, match="monkey_patch has no MODEL_TYPE_TO_APPLY_LIGER_FN"):
        keep_experts()


@pytest.mark.parametrize("package, use, others", [("ray", use_ray, ("2.54.1", "2.56.0")), ("liger-kernel", keep_experts, ("0.8.4", "0.9.0"))])
def test_other_versions_are_refused(liger, monkeypatch, package, use, others):
    use()
    for other in others:
        monkeypatch.setattr(versions, "version", lambda name, other=other: other)
        with pytest.raises(PatchError, match=rf"{package} {other} is installed, but qarl_openrlhf's patches are written for {package}"):
            use()


def test_what_a_base_class_has_is_no_target():
    class Base:
        def method(self): ...

    class Owner(Base):
        own = 1

    with pytest.raises(PatchError, match="Owner has no method.*tests is not installed"):
        replacing.replace(Owner, "method", None)
    with pytest.raises(KeyError), replacing.replaced(Owner, "own", 2):
        assert Owner.own == 2
        raise KeyError
    assert Owner.own == 1


WRAPPED = [
    *(("liveness", name) for name in ("errored", "engine_core", "engine_core.call_utility_async")),
    *(("token_versions", name) for name in ("output_processor", "output_processor.request_states", "output_processor.process_outputs")),
]


@pytest.mark.parametrize("module, gone", WRAPPED)
def test_what_an_engine_lacks_is_named(module, gone):
    """engine/liveness.py and engine/token_versions.py wrap methods of vLLM's objects."""
    module = pytest.importorskip(f"qarl_openrlhf.engine.{module}")
    processor = N(request_states={}, process_outputs=None)
    llm = N(errored=False, engine_core=N(call_utility_async=None), output_processor=processor)
    owner, _, name = gone.rpartition(".")
    delattr(getattr(llm, owner) if owner else llm, name)
    with pytest.raises(PatchError, match=f"SimpleNamespace has no {name}, which"):
        module.fail_when_dead(llm, RuntimeError) if hasattr(module, "fail_when_dead") else module.TokenVersions(llm)


# Of objects that are made here, or of a model: no names that someone else's code reads.
OWN = {"_qarl", "__spec__", "__path__", "target_device", "inv_freq", "original_inv_freq", "modules", "argv"}


@pytest.mark.parametrize("file", sorted(path.name for path in PACKAGE.glob("*.py") if path.name != "replacing.py"))
def test_every_assignment_looks_first(file):
    tree = ast.parse((PACKAGE / file).read_text())
    assigned = [t.attr for node in ast.walk(tree) for t in getattr(node, "targets", ()) for t in ast.walk(t) if isinstance(t, ast.Attribute)]
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert set(assigned) <= OWN and "setattr" not in called
