"""Each kernel's layout whole: against FlashInfer's own bytes, there and back, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import CASES, Case, canonical, digest, draw

from fp4ep.optimized.kernel_layouts import KERNEL_LAYOUTS, KernelState
from fp4ep.reference.schemes import find_scheme
from fp4ep.reference.types import MoEWeights
from fp4ep.reference.weights import load_operand, mxfp4_rewrite

VECTORS = json.loads((Path(__file__).parent / "data" / "layouts_flashinfer_0_7_4.json").read_text(encoding="utf-8"))


def ready(case: Case) -> MoEWeights:
    """The case's weights as the kernel's layout takes them."""
    weights = canonical(case)
    if case.kernel != "sm90_mxfp4":
        return weights
    return MoEWeights(*rewritten(weights))


def rewritten(weights: MoEWeights) -> tuple[torch.Tensor, ...]:
    w13, w13_scale = mxfp4_rewrite(weights.w13, weights.w13_scale)
    w2, w2_scale = mxfp4_rewrite(weights.w2, weights.w2_scale)
    return w13, w2, w13_scale, w2_scale


def unpack(case: Case, state: KernelState, **options) -> MoEWeights:
    layout = KERNEL_LAYOUTS[case.kernel]
    return layout.unpack(state, hidden=case.hidden, intermediate=case.intermediate, **(options or case.options))


def tensors(record: MoEWeights | KernelState) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in vars(record).items() if tensor is not None}


def assert_equal(left: MoEWeights | KernelState, right: MoEWeights | KernelState) -> None:
    assert {n: digest(t) for n, t in tensors(left).items()} == {n: digest(t) for n, t in tensors(right).items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pack_gives_flashinfers_bytes(case):
    state = KERNEL_LAYOUTS[case.kernel].pack(ready(case), **case.options)
    assert {name: digest(tensor) for name, tensor in tensors(state).items()} == VECTORS[str(case)]
    assert all(tensor.is_contiguous() for tensor in tensors(state).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpack_undoes_pack(case):
    weights = ready(case)
    state = KERNEL_LAYOUTS[case.kernel].pack(weights, **case.options)
    back = unpack(case, state)
    assert_equal(back, weights)
    assert_equal(KERNEL_LAYOUTS[case.kernel].pack(back, **case.options), state)


SCHEMES = {
    "cutedsl": find_scheme("sm100_nvfp4_nvfp4_bf16_cutedsl"),
    "sm90_nvfp4": find_scheme("sm90_fp8_nvfp4_bf16_pull_cutedsl"),
    "sm90_mxfp4": find_scheme("sm90_fp8_mxfp4_bf16_pull_cutedsl"),
    "sm90_fp8": find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl"),
    "sm90_fp8-blockwise": find_scheme("sm90_fp8_fp8_bf16_pull_cutedsl", fp8_scale_mode="blockwise"),
    "sm90_bf16": find_scheme("sm90_bf16_bf16_bf16_pull_cutedsl"),
}


@pytest.mark.parametrize("case", [case for case in CASES if case.kernel != "deep_gemm"], ids=str)
def test_the_operands_survive(case):
    """Of the weights as they were given: for MXFP4 before the rewrite."""
    scheme, weights = SCHEMES[case.kernel + "-blockwise" * case.blockwise], canonical(case)
    back = unpack(case, KERNEL_LAYOUTS[case.kernel].pack(ready(case), **case.options))
    for leg in ("w13", "w2"):
        for expert in range(case.experts):
            wanted, found = (load_operand(scheme, w, leg, expert) for w in (weights, back))
            assert torch.equal(found.scale, wanted.scale)
            # By value: the rewrite of a rewritten code loses the sign of a zero, see the next test.
            assert torch.equal(found.values.nan_to_num(nan=512), wanted.values.nan_to_num(nan=512))


def test_mxfp4_state_tells_the_zeros_apart_where_the_canonical_form_cannot():
    """-0.5 four times finer than the range becomes -0 in the kernel; canonical -0 in range becomes +0."""
    packed = torch.zeros(1, 128, 64, dtype=torch.uint8)
    packed[0, 0, 0], packed[0, 0, 16] = 0x99, 0x98  # -0.5, -0.5 below the range; -0, -0.5 at its bottom
    scale = torch.full((1, 128, 4), 100, dtype=torch.uint8)
    scale[0, 0] = torch.tensor([98, 100, 111, 111])
    once, raised = mxfp4_rewrite(packed, scale)
    assert raised[0, 0].tolist() == [100, 100, 111, 111]
    assert once[0, 0, [0, 16]].tolist() == [0x88, 0x90]
    again, _ = mxfp4_rewrite(once, raised)
    assert again[0, 0, [0, 16]].tolist() == [0x00, 0x90]
    weights = MoEWeights(once.repeat(1, 2, 1), once, raised.repeat(1, 2, 1), raised)
    state = KERNEL_LAYOUTS["sm90_mxfp4"].pack(weights)
    assert_equal(KERNEL_LAYOUTS["sm90_mxfp4"].unpack(state, hidden=128, intermediate=128), weights)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(KERNEL_LAYOUTS)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99)
)
def test_round_trip_of_any_shape(kernel, experts, h, i, seed):
    layout = KERNEL_LAYOUTS[kernel]
    step = {"cutedsl": (16, 16), "sm90_fp8": (64, 64), "sm90_bf16": (8, 8)}.get(kernel, (128, 128))
    options = {"kperm": (0, 32, 64)[seed % 3]} if kernel == "sm90_nvfp4" else {}
    case = Case(kernel, experts, h * step[0], i * step[1], options)
    weights = ready(case)
    state = layout.pack(weights, **options)
    assert_equal(unpack(case, state), weights)
    single = [layout.pack(weights.of_experts(slice(e, e + 1)), **options) for e in range(experts)]
    assert_equal(
        state, KernelState(**{n: torch.cat([getattr(s, n) for s in single]) for n in tensors(state)} | none(state))
    )


def none(state: KernelState) -> dict[str, None]:
    return {name: None for name, tensor in vars(state).items() if tensor is None}


def test_what_does_not_move_is_not_copied():
    case = CASES[0]
    weights = canonical(case)
    state = KERNEL_LAYOUTS["cutedsl"].pack(weights)
    assert state.fc2_weight.data_ptr() == weights.w2.data_ptr()
    assert state.fc1_weight.data_ptr() != weights.w13.data_ptr()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pack_leaves_its_input_alone(case):
    weights = ready(case)
    before = {name: tensor.clone() for name, tensor in tensors(weights).items()}
    unpack(case, KERNEL_LAYOUTS[case.kernel].pack(weights, **case.options))
    assert all(digest(tensors(weights)[name]) == digest(tensor) for name, tensor in before.items())


def test_torch_dtypes_are_taken_as_their_bytes():
    nvfp4, mxfp4, fp8 = (
        canonical(next(c for c in CASES if c.kernel == k)) for k in ("cutedsl", "deep_gemm", "sm90_fp8")
    )
    views = {
        "cutedsl": (nvfp4, torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        "deep_gemm": (mxfp4, torch.int8, torch.float8_e8m0fnu),
    }
    for kernel, (weights, code, scale) in views.items():
        dtypes = {"w13": code, "w2": code, "w13_scale": scale, "w2_scale": scale}
        typed = replace(weights, **{name: getattr(weights, name).view(dtype) for name, dtype in dtypes.items()})
        assert_equal(KERNEL_LAYOUTS[kernel].pack(typed), KERNEL_LAYOUTS[kernel].pack(weights))
    typed = replace(fp8, w13=fp8.w13.view(torch.float8_e4m3fn), w2=fp8.w2.view(torch.float8_e5m2))
    assert_equal(KERNEL_LAYOUTS["sm90_fp8"].pack(typed), KERNEL_LAYOUTS["sm90_fp8"].pack(fp8))


NVFP4 = next(case for case in CASES if case.kernel == "sm90_nvfp4" and case.options["kperm"] == 64)
MXFP4 = next(case for case in CASES if case.kernel == "sm90_mxfp4" and case.experts == 5)


def test_a_global_scale_of_all_experts_and_none():
    weights = canonical(NVFP4)
    pack = KERNEL_LAYOUTS["sm90_nvfp4"].pack
    one = pack(replace(weights, w13_global_scale=torch.tensor(0.3), w2_global_scale=torch.tensor([0.7])))
    assert one.fc1_alpha.tolist() == [8 * float(torch.tensor(0.3))] * 2
    assert one.fc2_alpha.tolist() == [8 * float(torch.tensor(0.7))] * 2
    assert pack(replace(weights, w13_global_scale=None, w2_global_scale=None)).fc1_alpha.tolist() == [8.0, 8.0]
    tiny = torch.tensor([1e-45, 2.0**124])
    assert unpack(NVFP4, pack(replace(weights, w13_global_scale=tiny))).w13_global_scale.tolist() == tiny.tolist()


def test_kperm_is_not_interchangeable():
    weights = canonical(NVFP4)
    state = KERNEL_LAYOUTS["sm90_nvfp4"].pack(weights, kperm=64)
    assert not torch.equal(unpack(NVFP4, state, kperm=32).w13, weights.w13)


@pytest.mark.parametrize("bottom", [0, 1, 249])
def test_mxfp4_decode_factor_at_the_ends(bottom):
    case = Case("sm90_mxfp4", 1, 128, 128)
    scales = [torch.full((1, rows, 4), bottom, dtype=torch.uint8) for rows in (256, 128)]
    weights = MoEWeights(draw("a", 1, 256, 64), draw("b", 1, 128, 64), *scales)
    weights = MoEWeights(*rewritten(weights))
    state = KERNEL_LAYOUTS["sm90_mxfp4"].pack(weights)
    assert state.fc1_alpha.tolist() == [2.0 ** (bottom - 122)]
    assert bool((state.fc1_scale == 1).all())
    assert_equal(unpack(case, state), weights)


BAD_WEIGHTS = [
    ("cutedsl", {"w13_global_scale": torch.ones(2)}, r"^w13_global_scale must be None"),
    ("cutedsl", {"w2_scale": None}, r"^w2_scale is missing"),
    ("cutedsl", {"w2": torch.zeros(2, 128)}, r"^w2 must have shape \[E, H, I / 2\]"),
    ("cutedsl", {"w13": torch.zeros(2, 128, 64)}, r"^w13 must have dtype torch.uint8"),
    ("cutedsl", {"w13_scale": torch.zeros(2, 128, 4, dtype=torch.uint8)}, r"^w13_scale must have shape \(2, 128, 8\)"),
    ("cutedsl", {"w13_scale": torch.zeros(2, 128, 8).to(torch.float8_e8m0fnu)}, r"^w13_scale must have dtype"),
    ("cutedsl", {"fc1_norm_const": torch.ones(2)}, r"^fc1_norm_const must be None"),
    ("deep_gemm", {"w2_global_scale": torch.ones(2)}, r"^w2_global_scale must be None: MXFP4"),
    ("sm90_nvfp4", {"w2_global_scale": torch.ones(3)}, r"^w2_global_scale must be float32, one number or one per"),
    ("sm90_nvfp4", {"w2_global_scale": torch.ones(2).double()}, r"^w2_global_scale must be float32"),
    (
        "sm90_nvfp4",
        {"w13_global_scale": torch.tensor([1.0, 2.0**125])},
        r"^w13_global_scale must be finite, also times 8",
    ),
    ("sm90_fp8", {"w13_scale": torch.ones(2, 1)}, r"^w13_scale must have shape \(2,\)"),
    ("sm90_fp8", {"w2_scale": torch.ones(2, 1, 1)}, r"^rows and columns of w2 must be a positive multiple of 128"),
    ("sm90_bf16", {"w13_scale": torch.ones(2)}, r"^w13_scale must be None"),
    ("sm90_bf16", {"w2": torch.zeros(2, 256, 64)}, r"^w2 must have dtype torch.bfloat16"),
]


@pytest.mark.parametrize(("kernel", "change", "message"), BAD_WEIGHTS)
def test_pack_refuses(kernel, change, message):
    case = next(case for case in CASES if case.kernel == kernel)
    with pytest.raises(ValueError, match=message):
        KERNEL_LAYOUTS[kernel].pack(replace(canonical(case), **change))


def test_mxfp4_must_be_rewritten():
    with pytest.raises(ValueError, match=r"^w13_scale spans more than 11 octaves"):
        KERNEL_LAYOUTS["sm90_mxfp4"].pack(canonical(MXFP4))
    high = replace(ready(MXFP4), w2_scale=torch.full((5, 128, 12), 250, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^w2_scale: the decode factor .* overflows from code 250"):
        KERNEL_LAYOUTS["sm90_mxfp4"].pack(high)


BAD_STATES = [
    ("cutedsl", {"fc1_alpha": torch.ones(2)}, {}, r"^fc1_alpha must be None"),
    ("cutedsl", {}, {"hidden": 256}, r"^fc1_weight must have shape \(2, 128, 128\)"),
    ("cutedsl", {}, {"hidden": 130}, r"^hidden must be a positive multiple of 16, got 130"),
    ("cutedsl", {"fc2_scale": torch.zeros(2, 4, dtype=torch.uint8)}, {}, r"^fc2_scale must have shape \(2, 512\)"),
    ("deep_gemm", {"fc2_scale": torch.zeros(2, 2, 256)}, {}, r"^fc2_scale must have dtype torch.int32"),
    ("sm90_nvfp4", {"fc1_alpha": None}, {}, r"^fc1_alpha is missing"),
    ("sm90_nvfp4", {"fc1_alpha": torch.tensor([1.0, float("inf")])}, {}, r"^fc1_alpha must be finite, and 8 times"),
    ("sm90_nvfp4", {"fc1_alpha": torch.tensor([1.0, 1e-45])}, {}, r"^fc1_alpha must be finite, and 8 times"),
    ("sm90_nvfp4", {}, {"kperm": 16}, r"^kperm must be 0, 32 or 64, got 16"),
    ("sm90_mxfp4", {"fc2_alpha": torch.tensor([1.0, 1.5, 2.0])}, {}, r"^fc2_alpha must be powers of two"),
    ("sm90_mxfp4", {"fc2_alpha": torch.tensor([1.0, -1.0, 2.0])}, {}, r"^fc2_alpha must be powers of two"),
    ("sm90_mxfp4", {"fc2_scale": torch.full((3, 4, 1, 16, 16), 2, dtype=torch.uint8)}, {}, r"^fc2_scale must hold off"),
    ("sm90_fp8", {"fc1_scale": torch.zeros(2, 1024, dtype=torch.uint8)}, {}, r"^fc1_scale must hold codes 127"),
    ("sm90_bf16", {"fc2_alpha": torch.ones(2)}, {}, r"^fc2_alpha must be None"),
]


@pytest.mark.parametrize(("kernel", "change", "arguments", "message"), BAD_STATES)
def test_unpack_refuses(kernel, change, arguments, message):
    case = next(case for case in CASES if case.kernel == kernel)
    state = replace(KERNEL_LAYOUTS[kernel].pack(ready(case), **case.options), **change)
    arguments = {"hidden": case.hidden, "intermediate": case.intermediate} | case.options | arguments
    with pytest.raises(ValueError, match=message):
        KERNEL_LAYOUTS[kernel].unpack(state, **arguments)
