"""MXFP4 to what a backend loads: every byte, every scale, and what the way to NVFP4 costs."""

import math
from dataclasses import replace

import pytest
import torch

from fp4ep.optimized.backends import (
    FLASHINFER_MOE_EP_CUTEDSL,
    FLASHINFER_MOE_EP_DEEP_GEMM,
    FLASHINFER_MOE_EP_SM90_BF16,
    FLASHINFER_MOE_EP_SM90_MXFP4,
    FLASHINFER_MOE_EP_SM90_NVFP4,
)
from fp4ep.optimized.mxfp4 import mxfp4_moe_ep_weights, rescaled_mxfp4_moe_ep_weights
from fp4ep.reference.quantize import dequantize_nvfp4, quantize_nvfp4_with_norm

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 32


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """`[..., K]` codes to `[..., K/2]` bytes, even column low."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def checkpoint(seed: int = 0, scale: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "w13": (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        "w2": (EXPERTS, HIDDEN, INTERMEDIATE // 2),
        "w13_scale": (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32),
        "w2_scale": (EXPERTS, HIDDEN, INTERMEDIATE // 32),
    }
    made = {n: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for n, shape in shapes.items()}
    if scale is not None:
        made |= {name: torch.full_like(t, scale) for name, t in made.items() if "scale" in name}
    return made


def value(code: int, scale: int) -> float:
    """What the format says, in Python's numbers."""
    if scale == 255:
        return math.nan
    magnitude = math.ldexp(E2M1[code & 7], scale - 127)
    return -magnitude if code & 8 else magnitude


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 251, 252, 253, 254, 255])
def test_row_10_dequantization_of_every_byte(scale, weight_dtype, scale_dtype):
    given = checkpoint(scale=scale)
    given["w13"] = torch.arange(256, dtype=torch.uint8).repeat(EXPERTS * 2 * INTERMEDIATE * HIDDEN // 512)
    given["w13"] = given["w13"].view(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2)
    expected = [value(code, scale) for byte in given["w13"].flatten().tolist() for code in (byte & 15, byte >> 4)]
    views = {n: t.view(scale_dtype if "scale" in n else weight_dtype) for n, t in given.items()}
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **views)
    assert (weights.w13.dtype, weights.w13_scale, weights.w2_scale) == (torch.bfloat16, None, None)
    assert weights.w13.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    # bf16 has every product up to 2^127 * 1.5 exactly, subnormals down to 2^-128 too; beyond, infinity.
    finite = torch.tensor(expected, dtype=torch.float64).to(torch.bfloat16).view_as(weights.w13)
    if scale == 255:
        assert weights.w13.isnan().all()
    else:
        assert torch.equal(bits(weights.w13), bits(finite))  # by bits: -0 stays
        assert scale > 252 or torch.equal(weights.w13.double(), torch.tensor(expected).double().view_as(finite))


def test_row_10_each_block_of_32_has_its_own_scale():
    given = checkpoint()
    for name in ("w13", "w2"):
        weights = getattr(mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **given), name)
        codes = torch.stack((given[name] & 15, given[name] >> 4), dim=-1).flatten(-2)
        scales = given[name + "_scale"].repeat_interleave(32, dim=-1)
        pairs = zip(codes.flatten().tolist(), scales.flatten().tolist(), strict=True)
        expected = torch.tensor([value(*pair) for pair in pairs], dtype=torch.float64).to(torch.bfloat16)
        live = (scales != 255).flatten()
        assert torch.equal(bits(weights.flatten()[live]), bits(expected[live]))
        assert weights.flatten()[~live].isnan().all()


def test_row_10_deep_gemm_gets_the_same_four_tensors():
    given = checkpoint()
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_DEEP_GEMM, **given)
    assert all(getattr(weights, name) is tensor for name, tensor in given.items())


def test_row_10_sm90_gets_the_same_memory_as_bytes():
    given = checkpoint()
    views = given | {"w13": given["w13"].view(torch.int8), "w2_scale": given["w2_scale"].view(torch.float8_e8m0fnu)}
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_SM90_MXFP4, **views)
    for name, tensor in given.items():
        assert getattr(weights, name).dtype is torch.uint8
        assert getattr(weights, name).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("backend", [FLASHINFER_MOE_EP_SM90_NVFP4, FLASHINFER_MOE_EP_SM90_BF16])
def test_row_10_other_backends_are_refused(backend):
    with pytest.raises(ValueError, match=f"{backend} does not load MXFP4 weights"):
        mxfp4_moe_ep_weights(backend, **checkpoint())
    with pytest.raises(ValueError, match="'auto' is not a FlashInfer MoE-EP backend"):
        mxfp4_moe_ep_weights("auto", **checkpoint())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13_scale": torch.zeros(EXPERTS, 64, 4, dtype=torch.uint8)}, r"w13_scale must have shape \(3, 64, 2\)"),
        ({"w2_scale": torch.zeros(EXPERTS, 64, dtype=torch.uint8)}, r"w2_scale must have shape \(3, 64, 1\)"),
        ({"w2": torch.zeros(EXPERTS, 64, 24, dtype=torch.uint8)}, "one per 32 codes"),
        ({"w13": torch.zeros(EXPERTS, 64, 32)}, "w13 must be .* bytes"),
        ({"w2_scale": torch.zeros(EXPERTS, 64, 1)}, "w2 must be .* one-byte scales"),
    ],
)
def test_row_10_shapes_and_dtypes_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **checkpoint() | change)


# Divergence (d): the global scale of MXFP4 weights that become NVFP4. A block of 16 whose largest code is c, with MXFP4
# exponent e, gets the block scale E4M3(c * 2^e / 6), and E4M3 goes down to 2^-9 in steps of 2^-9, ties to even: c = 6
# gives 2^e, which is there for e >= -9 and a tie with 0 for e = -10.

LARGEST = (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5)


def one_largest_per_row(exponent: int, experts: int = 1) -> dict[str, torch.Tensor]:
    """Rows whose blocks of 16 all have the same largest code, all scales 2^exponent. Row r: LARGEST[r % 7]."""
    made = checkpoint(scale=exponent + 127)
    for name in ("w13", "w2"):
        shape = made[name].shape
        magnitudes = torch.arange(shape[1]).remainder(len(LARGEST)).mul(-1).add(len(LARGEST))[None, :, None]
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(0, 8, (*shape[:2], 2 * shape[2]), generator=generator)
        codes = torch.minimum(codes, magnitudes)
        codes[..., ::16] = magnitudes
        codes |= torch.randint(0, 2, codes.shape, generator=generator) << 3
        made[name] = packed(codes)
    return made


def by_flashinfer(weight: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """What the weights are worth after FlashInfer's quantization to NVFP4 with global scale 1, float64."""
    quantized = replace(quantize_nvfp4_with_norm(weight), global_scale=torch.ones(weight.shape[0]))
    worth = dequantize_nvfp4(quantized).double()
    return worth if alpha is None else worth * alpha.double()[:, None, None]


def rows_of(weight: torch.Tensor, largest: float) -> torch.Tensor:
    return weight[:, LARGEST.index(largest) :: len(LARGEST)]


@pytest.mark.parametrize("exponent", range(-13, 9))
def test_divergence_d_unit_global_scale_loses_small_exponents(exponent):
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **one_largest_per_row(exponent)).w13
    worth = by_flashinfer(weights)
    for largest, least in ((6.0, -9), (3.0, -8), (1.5, -7)):  # amax / 6 is 2^e, 2^(e-1), 2^(e-2)
        kept, given = rows_of(worth, largest), rows_of(weights.double(), largest)
        assert torch.equal(kept, given) if exponent >= least else not kept.any()
    assert worth.any() == (exponent >= -9)


def test_divergence_d_a_grid_change_costs_about_five_percent():
    """Relative errors per kind of block, from the codes alone: s = E4M3(c / 6), then each code to the nearest of s."""
    weights = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **one_largest_per_row(0)).w13.double()
    error = by_flashinfer(weights.bfloat16()) - weights
    for largest, scale in ((4.0, 0.6875), (2.0, 0.34375), (1.0, 0.171875), (0.5, 0.0859375)):  # 2/3 in 3 bits: 11/16
        steps = torch.tensor([-v for v in E2M1[:0:-1]] + list(E2M1), dtype=torch.float64) * scale
        given = rows_of(weights, largest)
        nearest = (given.unsqueeze(-1) - steps).abs().min(dim=-1).values
        assert torch.equal(rows_of(error, largest).abs(), nearest)
        assert 0.02 < nearest.norm() / given.norm() < 0.11


@pytest.mark.parametrize("exponent", [-127, -126, -100, -40, -11, -10, -9, -6, 0, 8, 40, 100, 127])
def test_divergence_d_rescaled_weights_lose_the_same_at_every_exponent(exponent):
    at_one = by_flashinfer(mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **one_largest_per_row(0)).w13)
    weights, epilogue = rescaled_mxfp4_moe_ep_weights(**one_largest_per_row(exponent))
    for alpha in (epilogue.fc1_alpha, epilogue.fc2_alpha):
        # The largest weight, 6 * 2^exponent, comes to 6 * 2^8: in [1024, 2048). Alphas end at 2^-126.
        assert alpha.tolist() == [2.0 ** max(exponent - 8, -126)] * EXPERTS
    assert torch.equal(by_flashinfer(weights.w13, epilogue.fc1_alpha), at_one * 2.0**exponent)


def test_divergence_d_each_expert_has_its_own_power():
    given = one_largest_per_row(0)
    for expert, exponent in enumerate((-90, 0, 90)):
        for name in ("w13_scale", "w2_scale"):
            given[name][expert] = 127 + exponent
    given["w2"][1] = 0
    weights, epilogue = rescaled_mxfp4_moe_ep_weights(**given)
    assert epilogue.fc1_alpha.tolist() == [2.0**-98, 2.0**-8, 2.0**82]
    assert epilogue.fc2_alpha.tolist() == [2.0**-98, 1.0, 2.0**82]  # nothing but zeros: nothing to scale
    assert epilogue.fc1_alpha.dtype is torch.float32
    assert (epilogue.fc1_norm_const, epilogue.input_norm_const) == (None, 1.0)
    plain = mxfp4_moe_ep_weights(FLASHINFER_MOE_EP_CUTEDSL, **given)
    for name, alpha in (("w13", epilogue.fc1_alpha), ("w2", epilogue.fc2_alpha)):
        scaled = getattr(weights, name).double() * alpha.double()[:, None, None]
        assert torch.equal(scaled, getattr(plain, name).double())  # taking a power of two out is exact


def test_divergence_d_nan_scales_stay_and_do_not_count():
    given = one_largest_per_row(-20)
    given["w13_scale"][0, 5, 0] = 255
    weights, epilogue = rescaled_mxfp4_moe_ep_weights(**given)
    assert epilogue.fc1_alpha.tolist() == [2.0**-28] * EXPERTS
    assert weights.w13.isnan().sum() == 32
    assert weights.w13[0, 5, :32].isnan().all()
