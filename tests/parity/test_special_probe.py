"""The probe's logic with functions in the GPU's place: what it finds, and what it writes."""

import json
import math
from functools import cache, partial

import pytest
import torch

from fp4ep.parity import special_probe
from fp4ep.parity.special_probe import PROBES, compare, main, measure, missing, remake_tables
from fp4ep.reference.special import EX2, RCP, div_approx, ex2_approx, rcp_approx

CHUNK = 1 << 11

RULES = {
    "ex2.approx.ftz.f32": ex2_approx,
    "ex2.approx.f32": partial(ex2_approx, ftz=False),
    "rcp.approx.ftz.f32": rcp_approx,
    "div.approx.ftz.f32": div_approx,
    "div.approx.f32": partial(div_approx, ftz=False),
}


@cache
def tables() -> dict[str, torch.Tensor]:
    """What the whole-table runs give."""
    return {
        "ex2.approx.ftz.f32": EX2.table(EX2.coefficients()).repeat_interleave(2),
        "rcp.approx.ftz.f32": RCP.table(RCP.coefficients()),
    }


class Stand:
    """A GPU that follows the rules, but for the instructions in `other`."""

    def __init__(self, **other):
        self.rules = RULES | other
        self.tables = dict(tables())

    def __call__(self, instruction: str, *operands: torch.Tensor) -> torch.Tensor:
        assert all(x.dtype == torch.float32 and x.dim() == 1 for x in operands)
        if len(operands[0]) >= 1 << 23:
            return self.tables[instruction]
        return self.rules[instruction](*operands)


def probe(instruction: str) -> special_probe.Probe:
    return next(probe for probe in PROBES if probe.instruction == instruction)


def differing(instruction: str, apply) -> dict[str, int]:
    rows = compare(probe(instruction), apply, "cpu", 7, CHUNK)
    return {row["arguments"]: row["differing"] for row in rows}


def test_equal_where_the_rules_hold(capsys):
    result = measure(Stand(), "cpu", 7, print, CHUNK)
    assert result["equal"] is True
    assert json.loads(json.dumps(result)) == result
    assert {row["instruction"] for row in result["comparisons"]} == set(RULES)
    assert all((row["differing"], row["first"]) == (0, []) for row in result["comparisons"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "table ex2.approx.ftz.f32: equal"
    assert f"rcp.approx.ftz.f32, any bits: {24 * CHUNK:,} tried, 0 differ" in lines


def test_every_instruction_meets_at_least_10_to_the_8_arguments_of_any_bits():
    for each in PROBES:
        assert each.arguments["any bits"][1] * special_probe.CHUNK >= 10**8


@pytest.mark.parametrize(("name", "places"), [("ex2.approx.ftz.f32", (10, 11)), ("rcp.approx.ftz.f32", (10,))])
def test_one_wrong_entry_of_a_table_is_found(name, places):
    stand = Stand()
    stand.tables[name] = stand.tables[name].clone()
    stand.tables[name][list(places)] *= 1 + 2.0**-23
    found = remake_tables(stand, "cpu")
    wrong = {title for title, row in found.items() if row["sha256"] != row["reference"]}
    assert wrong == {title for title in found if title.startswith(name)}


def test_a_wrong_table_or_one_wrong_result_is_not_equal(monkeypatch):
    monkeypatch.setattr(special_probe, "PROBES", (probe("rcp.approx.ftz.f32"),))
    stand = Stand()
    stand.tables["rcp.approx.ftz.f32"] = stand.tables["rcp.approx.ftz.f32"].flip(0)
    assert measure(stand, "cpu", 7, lambda line: None, 64)["equal"] is False
    stand = Stand(**{"rcp.approx.ftz.f32": lambda x: torch.where(x == 1.0, 1.5, rcp_approx(x))})
    lines = []
    assert measure(stand, "cpu", 7, lines.append, CHUNK)["equal"] is False
    assert any("'arguments': ['0x3f800000'], 'hardware': '0x3fc00000', 'rule': '0x3f800000'" in line for line in lines)


def flushed(first: bool):
    """div.approx.ftz by a multiplier that flushes before it rounds, or after it rounded as gradual underflow does."""

    def divide(a, b):
        a = torch.where(a.abs() < 2.0**-126, a * 0.0, a)
        product = a.double() * rcp_approx(b).double()
        below = product if first else a * rcp_approx(b)
        return torch.where(below.abs() < 2.0**-126, div_approx(a, b) * 0.0, product.float())

    return divide


@pytest.mark.parametrize(
    ("instruction", "wrong", "sets"),
    [
        ("ex2.approx.ftz.f32", lambda x: torch.where(x == -126, 0.0, ex2_approx(x)), {"whole"}),
        (
            "ex2.approx.ftz.f32",
            lambda x: torch.where((x < 0) & (x > -(2.0**-22)), ex2_approx(x) - 2.0**-24, ex2_approx(x)),
            {"any bits", "below 2^-20", "whole"},
        ),
        ("ex2.approx.f32", ex2_approx, {"-150 to 130", "whole", "edges"}),
        (
            "rcp.approx.ftz.f32",
            lambda x: torch.where(x.isnan(), math.nan, rcp_approx(x)),
            {"any bits", "edges"},
        ),
        ("rcp.approx.ftz.f32", lambda x: (1 / x.double()).float(), {"any bits"}),
        (
            "div.approx.f32",
            lambda a, b: torch.where(b.abs() > 2.0**126, 0.0, div_approx(a, b, ftz=False)),
            {"any bits", "divisor above 2^125", "edges"},
        ),
        ("div.approx.f32", div_approx, {"any bits", "at 2^-126", "edges"}),
        ("div.approx.ftz.f32", flushed(True), {"at 2^-126"}),
        ("div.approx.ftz.f32", flushed(False), {"at 2^-126"}),
    ],
)
def test_another_rule_is_found_in_the_sets_meant_for_it(instruction, wrong, sets):
    found = differing(instruction, Stand(**{instruction: wrong}))
    assert {name for name, count in found.items() if count} >= sets
    assert differing(instruction, Stand()) == dict.fromkeys(found, 0)


def test_the_first_that_differ_are_named():
    def wrong(a, b):
        return torch.where(a.abs() > 2.0, -div_approx(a, b), div_approx(a, b))

    row = next(compare(probe("div.approx.ftz.f32"), Stand(**{"div.approx.ftz.f32": wrong}), "cpu", 7, CHUNK))
    first = row["first"]
    assert len(first) == special_probe.SHOWN
    for each in first:
        a, b, hardware, model = (
            torch.tensor(int(code, 16)).int().view(torch.float32)
            for code in (*each["arguments"], each["hardware"], each["rule"])
        )
        assert torch.equal(div_approx(a, b).view(torch.int32), model.view(torch.int32))
        assert torch.equal(wrong(a, b).view(torch.int32), hardware.view(torch.int32))


def test_argument_sets_hold_what_their_names_say():
    random = torch.Generator().manual_seed(0)
    (x,) = special_probe._one(1 << 16, random)
    assert bool(x.isnan().any() and (x.abs() < 2.0**-126).any() and (x < 0).any() and (x > 0).any())
    (x,) = special_probe._uniform(1 << 16, random)
    assert -150 <= float(x.min()) < -149
    assert 129 < float(x.max()) <= 130
    (x,) = special_probe._tiny(1 << 16, random)
    assert 0 < float(x.abs().max()) < 2.0**-20
    assert bool((x.abs() < 2.0**-126).any() and (x < 0).any())
    (x,) = special_probe._one_edge(1 << 12, random)
    assert set(special_probe._EDGES) <= set(x.tolist())
    assert bool(x.isnan().any() and ((x == 0) & x.signbit()).any() and (x == -math.inf).any())
    (x,) = special_probe._near_whole(1 << 17, random)
    assert set(x[x == x.round()].int().tolist()) == set(range(-150, 131))
    assert bool(((x == 0) & x.signbit()).any() and (x != x.round()).any())
    a, b = special_probe._large_divisor(1 << 12, random)
    assert bool(((b.abs() >= 2.0**125) & b.isfinite()).all() and (b.abs() > 2.0**126).any())
    a, b = special_probe._quotient_at_flush(1 << 12, random)
    ratio = a.double() * rcp_approx(b).double() * 2.0**126
    assert float((ratio - 1).abs().max()) < 8 * 2.0**-23
    assert bool((ratio < 1).any() and (ratio > 1).any())


def test_the_same_seed_gives_the_same_arguments():
    for each in PROBES:
        for draw, _ in each.arguments.values():
            one, two = (draw(64, torch.Generator().manual_seed(3)) for _ in range(2))
            assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, two, strict=True))


@pytest.mark.skipif(missing() is None, reason="a GPU is here")
def test_without_a_gpu(tmp_path, capsys):
    assert main([str(tmp_path / "out.json")]) == 3
    assert capsys.readouterr().err == f"cannot run here: {missing()}\n"
    assert not list(tmp_path.iterdir())


def test_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing() == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert missing() == "the rules are Hopper's (compute capability 9.0), the GPU is A100"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(special_probe, "find_spec", lambda name: None)
    assert missing() == "triton is not installed"
    monkeypatch.setattr(special_probe, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert missing() == "nvidia-smi, which knows the driver's version, is not there"


@pytest.mark.gpu
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_on_the_gpu():
    from fp4ep.parity.special_kernel import apply

    assert measure(apply, "cuda", 7, print, 1 << 16)["equal"]
