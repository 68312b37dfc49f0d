"""w4a16_mma: every tile on a card against float64; elsewhere it is compiled for cards that are not there."""

import pytest
import torch

triton = pytest.importorskip("triton")

from qarl_openrlhf.kernels import w4a16_gemm, w4a16_mma  # noqa: E402
from qarl_openrlhf.kernels.dequantize import dequantize_int4  # noqa: E402
from qarl_openrlhf.kernels.library import INTERPRETED  # noqa: E402
from qarl_openrlhf.quant import QuantScheme, quantize_weight  # noqa: E402

TYPES = {
    "x": "*bf16", "packed": "*i32", "scales": "*bf16", "y": "*bf16", "bias": "*bf16", "partial": "*fp32", "done": "*i32",
    "M": "i32", "N": "i32", "row_words": "i32", "SPLIT": "i32",
}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("tile", range(len(w4a16_mma.TILES)))
@pytest.mark.parametrize("capability", [80, 90])
def test_unpacked_weights_stay_in_registers(tile, capability):
    """Compiled for a card: packed words come 16 bytes at a time, and what goes into shared memory is x and the result."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    (bn, warps), sub = w4a16_mma.TILES[tile], w4a16_mma.SUB
    kernel, bm = w4a16_mma._kernel, 16
    constants = {"G": 128, "BM": bm, "BN": bn, "SUB": sub, "IS_SPLIT": True, "HAS_BIAS": True, "WARPS": warps}
    names = kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if TYPES.get(n, "").startswith("*")}
    aligned[names.index("row_words"),] = [["tt.divisibility", 16]]
    source = GluonASTSource(
        kernel, {n: TYPES.get(n, "constexpr") for n in names}, {(names.index(n),): v for n, v in constants.items()}, aligned
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]
    loop = ptx.split("mma.sync")
    products = bn // 16 // warps * (bm // 8) * 8 * sub
    assert len(loop) == products + 1
    stores = sum(part.count("st.shared") for part in loop[:-1])
    values = bm * 128 * sub // (32 * warps)  # of x, for each thread; a store takes 8
    assert stores == max(values // 8, 2)
    assert "evict_first.L2::cache_hint.v4.b32" in loop[0]


def test_configurations_fit_their_shapes():
    for n, k in [(48, 256), (4096, 12288), (24576, 4096), (100, 768), (3584, 18944)]:
        assert w4a16_mma.suits(k, 128)
        for config in w4a16_mma.fitting(n, k):
            assert 1 <= config.sizes[1] <= k // (128 * w4a16_mma.SUB)
    assert not w4a16_mma.suits(576, 64) and not w4a16_mma.suits(256, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4a16", "w4a16:g64", "w4a16:g32"])
@pytest.mark.parametrize("m, n, k", [(1, 48, 256), (5, 200, 768), (16, 130, 1024), (33, 96, 512)])
def test_every_tile_against_float64(m, n, k, name):
    x, w, bias = torch.randn(m, k).bfloat16(), (torch.randn(n, k) * 0.02).bfloat16(), torch.randn(n).bfloat16()
    quantized = quantize_weight(w, QuantScheme.parse(name))
    x, bias, packed, scales = (t.cuda() for t in (x, bias, quantized.weight_packed, quantized.weight_scale))
    exact = x.double() @ dequantize_int4(packed, scales).double().T
    arrivals = torch.zeros(64, dtype=torch.int32, device="cuda")
    for bn, warps in w4a16_mma.TILES:
        for split in (1, 3):
            config, results = w4a16_mma.Config((bn, min(split, k // (128 * w4a16_mma.SUB))), warps, 1), []
            for b in (None, bias, bias):
                y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
                w4a16_mma.launch(config, x, packed, scales, b, y, arrivals)
                expected = exact if b is None else exact + bias.double()
                assert (y.double() - expected).norm() < 3e-3 * expected.norm(), config
                results.append(y)
            assert torch.equal(results[1], results[2]) and not arrivals.any()


@pytest.mark.gpu
def test_it_is_what_w4a16_gemm_runs(monkeypatch):
    ran = []
    launch = w4a16_mma.launch
    monkeypatch.setattr(w4a16_mma, "launch", lambda config, *args: (ran.append(config), launch(config, *args)))
    x, w = torch.randn(3, 256).bfloat16().cuda(), torch.randn(64, 256).bfloat16()
    quantized = quantize_weight(w, QuantScheme.parse("w4a16"))
    w4a16_gemm.w4a16_gemm(x, quantized.weight_packed.cuda(), quantized.weight_scale.cuda(), None)
    assert ran
