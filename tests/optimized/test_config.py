"""The configuration records, and that objects of other classes with the same content are understood."""

from collections import namedtuple
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from types import SimpleNamespace

import pytest
import torch

from fp4ep.optimized.config import (
    Deployment,
    EpGroup,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    GroupShape,
    MoEActivation,
    QuantKey,
    RoutingMethodType,
    ScaleDesc,
    activation_name,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kMxfp4Static,
    kNvfp4Dynamic,
    kNvfp4Static,
    quant_key_signature,
    routing_method_name,
    weight_format,
)

KEYS = (kNvfp4Static, kNvfp4Dynamic, kMxfp4Static, kFp8StaticTensorSym, kFp8Static128BlockSym)
SIZES = {"num_experts": 8, "experts_per_token": 2, "hidden_dim": 256, "intermediate_size": 128, "max_num_tokens": 16}


def foreign(key: QuantKey) -> object:
    """The key as another package would write it: classes of its own, same fields."""
    shape = namedtuple("TheirShape", "row col")

    def scale(desc: ScaleDesc | None) -> object:
        if desc is None:
            return None
        return SimpleNamespace(dtype=desc.dtype, static=desc.static, group_shape=shape(*desc.group_shape))

    @dataclass(frozen=True)
    class TheirKey:
        dtype: object
        scale: object
        scale2: object
        symmetric: bool

    return TheirKey(key.dtype, scale(key.scale), scale(key.scale2), key.symmetric)


def test_row_02_quant_keys_are_hashable_and_distinct():
    assert len(set(KEYS)) == len(KEYS)
    assert len({quant_key_signature(key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_row_02_quant_keys_are_recognised_by_structure(key):
    assert foreign(key) != key
    assert quant_key_signature(foreign(key)) == quant_key_signature(key)
    assert weight_format(foreign(key)) == weight_format(key)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (kNvfp4Static, "nvfp4"),
        (kMxfp4Static, "mxfp4"),
        (kFp8StaticTensorSym, "fp8"),
        (kFp8Static128BlockSym, "fp8"),
        (None, "bf16"),
        (kNvfp4Dynamic, None),  # weights are never quantized as they come
        (replace(kNvfp4Static, scale2=None), None),
        (replace(kNvfp4Static, scale2=ScaleDesc(torch.float32, True, GroupShape(1, -1))), None),  # per row
        (replace(kNvfp4Static, scale=ScaleDesc(torch.float8_e4m3fn, True, GroupShape(1, 32))), None),
        (replace(kMxfp4Static, scale=kNvfp4Static.scale), None),
        (replace(kMxfp4Static, symmetric=False), None),
    ],
    ids=str,
)
def test_row_02_weight_formats(key, expected):
    assert weight_format(key) == expected


def test_row_02_quant_keys_print_as_vllms():
    assert str(kNvfp4Static) == (
        "QuantKey(u8,scale(f8e4m3fn,static,GroupShape(row=1, col=16)),scale2(f32,static,per_tensor),symmetric)"
    )
    assert str(kMxfp4Static) == "QuantKey(u8,scale(u8,static,GroupShape(row=1, col=32)),symmetric)"
    assert str(replace(kFp8StaticTensorSym, symmetric=False)) == (
        "QuantKey(f8e4m3fn,scale(f32,static,per_tensor),asymmetric)"
    )


def test_row_03_moe_config_counts_physical_experts_of_all_ranks():
    moe = FusedMoEConfig(moe_backend="any", **SIZES, moe_parallel_config=FusedMoEParallelConfig(ep_size=4, ep_rank=3))
    assert (moe.num_experts, moe.num_local_experts) == (8, 2)
    assert (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta) == (None, None, None)
    assert moe.in_dtype is torch.bfloat16
    assert (moe.has_bias, moe.is_lora_enabled, moe.skip_final_all_reduce) == (False, False, False)
    assert moe.is_act_and_mul
    assert not replace(moe, activation=MoEActivation.RELU2_NO_MUL).is_act_and_mul


@pytest.mark.parametrize("name", SIZES)
def test_row_03_moe_config_refuses_sizes_that_are_not_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0, must be positive"):
        FusedMoEConfig(moe_backend="any", **SIZES | {name: 0})


def test_row_03_ranks_divide_the_experts_and_contain_the_rank():
    with pytest.raises(ValueError, match="num_experts is 8, not a multiple of 3"):
        FusedMoEConfig(moe_backend="any", **SIZES, moe_parallel_config=FusedMoEParallelConfig(ep_size=3))
    with pytest.raises(ValueError, match=r"ep_rank is 2, must be in \[0, 2\)"):
        FusedMoEParallelConfig(ep_size=2, ep_rank=2)
    with pytest.raises(ValueError, match=r"rank_in_group is -1, must be in \[0, 2\)"):
        EpGroup(2, -1)


def test_row_03_routing_methods_have_vllms_numbers_and_names():
    assert [int(method) for method in RoutingMethodType] == [*range(10), 100, 101, 102]
    assert (RoutingMethodType.Llama4, RoutingMethodType.DeepseekV4) == (3, 100)
    theirs = IntEnum("theirs", {"DeepseekV4": 100, "Later": 103})
    for method in (RoutingMethodType.DeepseekV4, theirs.DeepseekV4, 100, "DeepseekV4"):
        assert routing_method_name(method) == "DeepseekV4"
    assert routing_method_name(theirs.Later) == "Later"
    assert routing_method_name(RoutingMethodType.Default) == "Default"  # 0
    with pytest.raises(ValueError, match="103 is not a valid"):
        routing_method_name(103)


def test_row_03_activations_and_formats_are_recognised_by_value():
    theirs = Enum("theirs", {"SILU": "silu"})
    assert {activation_name(a) for a in (MoEActivation.SILU, theirs.SILU, "silu")} == {"silu"}
    assert FusedMoEActivationFormat.Standard.value == ("standard",)


def test_row_04_a_deployment_asks_for_nothing_by_default():
    assert Deployment() == Deployment(
        weight_transfer=False,
        enable_dbo=False,
        enable_eplb=False,
        capability=None,
        all2all_backend="allgather_reducescatter",
        batch_invariant=False,
    )
