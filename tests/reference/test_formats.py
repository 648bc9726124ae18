"""Every code and every bf16 value against ml_dtypes, gfloat and torch.

Where a peer differs, the test says for which values and what it gives instead.
"""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3, format_info_ocp_e5m2, format_info_ocp_e8m0

from fp4ep.reference.formats import (
    E2M1,
    E4M3,
    E5M2,
    UE8M0,
    Overflow,
    decode,
    encode,
    pack_e2m1,
    round_to,
    unpack_e2m1,
)

ELEMENTS = [E2M1, E4M3, E5M2]
FORMATS = [*ELEMENTS, UE8M0]
ML_DTYPES = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    UE8M0: ml_dtypes.float8_e8m0fnu,
}
GFLOAT = {
    E2M1: format_info_ocp_e2m1,
    E4M3: format_info_ocp_e4m3,
    E5M2: format_info_ocp_e5m2,
    UE8M0: format_info_ocp_e8m0,
}
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, UE8M0: torch.float8_e8m0fnu}

#: The smallest bf16 magnitudes that round beyond the largest finite value. 464 is a tie whose even code is 448; the
#: next bf16 is 466. 61440 is a tie whose even code is infinity.
BEYOND = {E2M1: float("inf"), E4M3: 466.0, E5M2: 61440.0}

#: All 65,536 bf16 values as float32, NaNs of both signs included.
BF16 = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
NAN = BF16.isnan()
SIGN = BF16.signbit().int() << 7


def all_codes(fmt):
    return torch.arange(1 << fmt.bits, dtype=torch.uint8)


def same_floats(a, b):
    """Equal bits, where every NaN counts as the same."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(
        a.view(np.int32)[~np.isnan(a)], b.view(np.int32)[~np.isnan(b)]
    )


# --- codes to values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_decode_every_code(fmt):
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    assert values.dtype == torch.float32
    assert same_floats(values, codes.numpy().view(ML_DTYPES[fmt]).astype(np.float32))
    assert same_floats(values, gfloat.decode_ndarray(GFLOAT[fmt], codes.numpy()))
    if fmt in TORCH:
        assert same_floats(values, codes.view(TORCH[fmt]).float())


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_properties_agree_with_gfloat(fmt):
    info = GFLOAT[fmt]
    assert fmt.bits == info.bits
    assert fmt.max == info.max
    assert fmt.bias == info.bias
    assert 2.0**fmt.min_exponent == (info.smallest_normal if fmt.mantissa_bits else info.smallest)
    assert bool(fmt.sign_bit) == info.is_signed


@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_encode_inverts_decode(fmt):
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    number = values.isfinite()
    assert torch.equal(encode(values, fmt)[number], codes[number])  # -0 included
    if fmt.inf_code is not None:
        assert torch.equal(encode(values, fmt, Overflow.INF)[~values.isnan()], codes[~values.isnan()])


def test_decode_takes_float8_tensors_and_keeps_the_shape():
    values = torch.tensor([[1.0, -0.0], [448.0, 2.0**-9]])
    assert same_floats(decode(values.to(torch.float8_e4m3fn), E4M3), values)


# --- values to codes: all bf16 values ----------------------------------------------------------------------------


def ml_dtypes_codes(fmt):
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(BF16.numpy().astype(ML_DTYPES[fmt]).view(np.uint8))


def gfloat_codes(fmt, *, saturate):
    values = BF16.double().numpy()
    if fmt is E2M1:
        values = np.where(np.isnan(values), 0.0, values)  # gfloat refuses NaN where the format has none
    rounded = gfloat.round_ndarray(GFLOAT[fmt], values, sat=saturate)
    return torch.from_numpy(gfloat.encode_ndarray(GFLOAT[fmt], rounded).astype(np.uint8))


def with_changes(codes, *changes):
    """`codes` with code `new | sign` wherever `mask` holds, for each (mask, new, sign)."""
    codes = codes.int()
    for mask, new, sign in changes:
        codes = torch.where(mask, new | sign, codes)
    return codes.to(torch.uint8)


def test_e2m1_differs_from_peers_in_nan_only():
    ours = encode(BF16, E2M1)
    assert set(ours[NAN].tolist()) == {7}  # +6
    flipped = (SIGN ^ 0x80) >> 4  # ml_dtypes: zero of the opposite sign
    assert torch.equal(ml_dtypes_codes(E2M1), with_changes(ours, (NAN, 0, flipped)))
    assert torch.equal(gfloat_codes(E2M1, saturate=True), with_changes(ours, (NAN, 0, 0)))  # the 0 put in above


def test_e4m3_nan_is_the_ml_dtypes_cast():
    ours = encode(BF16, E4M3, Overflow.NAN)
    assert torch.equal(ml_dtypes_codes(E4M3), ours)
    # gfloat has one NaN, 0xFF, for NaN of either sign and for either overflow.
    lost = NAN | (BF16.abs() >= BEYOND[E4M3])
    assert torch.equal(gfloat_codes(E4M3, saturate=False), with_changes(ours, (lost, 0xFF, 0)))


def test_e4m3_saturate_differs_beyond_464_and_in_the_sign_of_nan():
    ours = encode(BF16, E4M3)
    beyond = BF16.abs() >= BEYOND[E4M3]  # infinity included
    assert int(beyond.sum()) == 30_512
    assert torch.equal(ml_dtypes_codes(E4M3), with_changes(ours, (NAN | beyond, 0x7F, SIGN)))
    assert torch.equal(gfloat_codes(E4M3, saturate=True), with_changes(ours, (NAN, 0xFF, 0)))


def test_e5m2_inf_is_the_ml_dtypes_cast_but_for_the_nan_code():
    ours = encode(BF16, E5M2, Overflow.INF)
    assert torch.equal(ml_dtypes_codes(E5M2), with_changes(ours, (NAN, 0x7E, SIGN)))
    assert torch.equal(gfloat_codes(E5M2, saturate=False), with_changes(ours, (NAN, 0xFF, 0)))


@pytest.mark.parametrize("overflow", [Overflow.SATURATE, Overflow.NAN])
def test_e5m2_otherwise_differs_from_61440_on(overflow):
    ours = encode(BF16, E5M2, overflow)
    beyond = BF16.abs() >= BEYOND[E5M2]
    assert int(beyond.sum()) == 28_706
    assert torch.equal(ml_dtypes_codes(E5M2), with_changes(ours, (beyond, 0x7C, SIGN), (NAN, 0x7E, SIGN)))
    if overflow is Overflow.SATURATE:
        assert torch.equal(gfloat_codes(E5M2, saturate=True), with_changes(ours, (NAN, 0xFF, 0)))
    else:
        gfloat_sees = gfloat_codes(E5M2, saturate=False)
        assert torch.equal(gfloat_sees, with_changes(ours, (beyond, 0x7C, SIGN), (NAN, 0xFF, 0)))


def test_e4m3_torch_cast_on_the_cpu():
    """torch 2.13 saturates on the CPU, older ones and CUDA give NaN: the cast must be wholly one or the other."""
    cast = BF16.to(torch.float8_e4m3fn).view(torch.uint8)
    if int(torch.tensor(1000.0).to(torch.float8_e4m3fn).view(torch.uint8)) == E4M3.max_code:
        expected = with_changes(encode(BF16, E4M3), (NAN, 0x7F, SIGN))  # the sign of NaN is kept there
    else:
        expected = encode(BF16, E4M3, Overflow.NAN)
    assert torch.equal(cast, expected)


def test_e5m2_torch_cast_is_overflow_inf():
    assert torch.equal(BF16.to(torch.float8_e5m2).view(torch.uint8), encode(BF16, E5M2, Overflow.INF))


@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_sign_of_zero_is_kept(fmt):
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-20])
    assert encode(tiny, fmt).tolist() == [0, 0, 0]
    assert encode(-tiny, fmt).tolist() == [fmt.sign_bit] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_convert_exactly(dtype):
    values = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    for fmt in ELEMENTS:
        assert torch.equal(encode(values, fmt), encode(values.float(), fmt))


# --- values to codes: float32 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code_and_neighbours_to_the_nearer(fmt, sign):
    lower = torch.arange(fmt.max_code, dtype=torch.uint8)
    upper = lower + 1
    midpoint = (decode(lower, fmt) + decode(upper, fmt)) / 2  # exact: one bit more than the format has
    below = torch.nextafter(midpoint, torch.tensor(0.0))
    above = torch.nextafter(midpoint, torch.tensor(1e9))
    negative = fmt.sign_bit if sign < 0 else 0
    assert torch.equal(encode(sign * midpoint, fmt), torch.where(lower % 2 == 0, lower, upper) | negative)
    assert torch.equal(encode(sign * below, fmt), lower | negative)
    assert torch.equal(encode(sign * above, fmt), upper | negative)


@pytest.mark.parametrize(
    ("fmt", "overflow", "tie", "at_tie", "above"),
    [
        (E4M3, Overflow.NAN, 464.0, 0x7E, 0x7F),
        (E4M3, Overflow.SATURATE, 464.0, 0x7E, 0x7E),
        (E5M2, Overflow.INF, 61440.0, 0x7C, 0x7C),
        (E5M2, Overflow.NAN, 61440.0, 0x7F, 0x7F),
        (E5M2, Overflow.SATURATE, 61440.0, 0x7B, 0x7B),
        (E2M1, Overflow.SATURATE, 7.0, 0x7, 0x7),
    ],
)
def test_overflow_begins_half_a_step_beyond_the_maximum(fmt, overflow, tie, at_tie, above):
    tie = torch.tensor(tie)
    values = torch.stack(
        [torch.nextafter(tie, torch.tensor(0.0)), tie, torch.nextafter(tie, torch.tensor(1e9)), torch.tensor(np.inf)]
    )
    expected = [fmt.max_code, at_tie, above, above]
    assert encode(values, fmt, overflow).tolist() == expected
    assert encode(-values, fmt, overflow).tolist() == [code | fmt.sign_bit for code in expected]


@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_random_float32_against_ml_dtypes(fmt):
    bits = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator().manual_seed(1)).to(torch.uint32)
    values = torch.cat((bits.view(torch.float32), bits.view(torch.int32) / 2.0**28, bits.view(torch.int32) / 2.0**40))
    values = values[values.abs() <= fmt.max]  # beyond: see the bf16 tests
    assert len(values) > 1 << 21
    peer = values.numpy().astype(ML_DTYPES[fmt]).view(np.uint8)
    assert np.array_equal(encode(values, fmt).numpy(), peer)


def test_one_rounding_only():
    value = torch.tensor(1.0625 + 2.0**-12)  # just above the tie between 1 and 1.125
    assert round_to(value, E4M3) == 1.125
    assert round_to(value.bfloat16(), E4M3) == 1.0  # bf16 falls on the tie


def test_e2m1_tie_vectors():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(ties, E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_encode_raises():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="ScaleRule"):
        encode(one, UE8M0)
    for fmt, overflow in [(E2M1, Overflow.NAN), (E2M1, Overflow.INF), (E4M3, Overflow.INF)]:
        with pytest.raises(ValueError, match=f"{overflow.name} is not possible in {fmt}"):
            encode(one, fmt, overflow)


# --- two codes per byte ------------------------------------------------------------------------------------------


def test_pack_every_pair():
    codes = torch.cartesian_prod(all_codes(E2M1), all_codes(E2M1))  # [256, 2]
    packed = pack_e2m1(codes)
    assert packed.shape == (256, 1)
    assert packed.unique().numel() == 256
    assert torch.equal(unpack_e2m1(packed), codes)


def test_the_even_element_is_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xA, 0xB]], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [[0x21, 0xBA]]
    assert unpack_e2m1(torch.tensor([0x21, 0xBA], dtype=torch.uint8)).tolist() == [0x1, 0x2, 0xA, 0xB]


def test_pack_raises():
    with pytest.raises(ValueError, match="even"):
        pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"4-bit.*16"):
        pack_e2m1(torch.tensor([1, 16], dtype=torch.uint8))
