"""What the recordings cover, as Markdown: scheme by property, elements compared, elements that differ."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fp4ep.reference.scheme import Evidence
from fp4ep.reference.schemes import SCHEMES, find_scheme

from .recording import GIVEN, Case, Recording

#: A case, and how many of its elements differ.
Judged = tuple[Recording, Case, int]

_START, _END = "<!-- made by fp4ep replay --page -->", "<!-- end of what is made -->"
#: What a case says of itself in `config` whatever the scheme; the rest are knobs.
_NO_KNOBS = {"max_tokens_per_rank", "world_size", "tokens_per_rank", "token_back_mode"}


class PageError(ValueError):
    """A file is no page that tables can be put into."""


def check_page(path: Path) -> tuple[str, str]:
    """What stands before and behind the tables. Raises PageError where the marks are not there, OSError as usual."""
    found = re.fullmatch(
        f"(.*{re.escape(_START)}\n).*({re.escape(_END)}.*)", path.read_text(encoding="utf-8"), re.DOTALL
    )
    if found is None:
        raise PageError(f"--page: {path} has no lines {_START!r} and {_END!r}")
    return found[1], found[2]


def write_page(path: Path, judged: Sequence[Judged]) -> None:
    """Put the tables into a Markdown file, between its two marks. Raises as `check_page`."""
    before, behind = check_page(path)
    path.write_text(f"{before}\n{tables(judged)}\n{behind}", encoding="utf-8")


def tables(judged: Sequence[Judged]) -> str:
    layers = [one for one in judged if one[1].kind == "moe"]
    others = [one for one in judged if one[1].kind != "moe"]
    elements = sum(elements_of(recording, case) for recording, case, _ in judged)
    differing = sum(count for *_, count in judged)
    recorded = {_name(case) for _, case, _ in layers}
    modelled = sorted({str(s) for s in SCHEMES if s.evidence is not Evidence.VERIFIED} - recorded)
    parts = [
        f"{len(judged)} cases, {elements:,} elements, {differing:,} differing.",
        _table(("scheme", "cases", "elements", "differing", *(name for name, _ in _PROPERTIES)), _rows(layers)),
        _table(("instruction", "cases", "elements", "differing"), _short(others)),
        "Modelled, in no recording: " + ", ".join(f"`{name}`" for name in modelled) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def elements_of(recording: Recording, case: Case) -> int:
    """Output elements, from the header alone."""
    given = GIVEN[case.kind]
    if given in case.tensors:
        return math.prod(recording.specs[case.tensors[given]]["shape"])
    (rows,) = recording.specs[case.tensors[f"{given}_rows"]]["shape"]
    if case.kind == "special_function":
        return rows
    like, side = {"moe": ("hidden_states", 1), "tensor_core": ("b", 0)}[case.kind]
    return rows * recording.specs[case.tensors[like]]["shape"][side]


# --- one row per scheme --------------------------------------------------------------------------------------------


def _name(case: Case) -> str:
    return str(find_scheme(case.scheme, **case.options)) if case.kind == "moe" else case.scheme


def _grouped(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for one in judged:
        groups.setdefault(_name(one[1]), []).append(one)
    return dict(sorted(groups.items()))


def _counts(name: str, group: list[Judged]) -> list[str]:
    elements = sum(elements_of(recording, case) for recording, case, _ in group)
    return [f"`{name}`", str(len(group)), f"{elements:,}", f"{sum(count for *_, count in group):,}"]


def _rows(judged: Iterable[Judged]) -> list[list[str]]:
    return [
        _counts(name, group) + [describe([(r, c) for r, c, _ in group]) for _, describe in _PROPERTIES]
        for name, group in _grouped(judged).items()
    ]


def _short(judged: Iterable[Judged]) -> list[list[str]]:
    return [_counts(name, group) for name, group in _grouped(judged).items()]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


Pairs = list[tuple[Recording, Case]]


def _size(role: str, place: int, scale: float = 1) -> Callable[[Pairs], str]:
    def describe(pairs: Pairs) -> str:
        sizes = {int(recording.specs[case.tensors[role]]["shape"][place] * scale) for recording, case in pairs}
        return str(min(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"

    return describe


def _clamps(pairs: Pairs) -> str:
    found = {case.options.get("gate_up_clamp", "default") for _, case in pairs}
    numbers = sorted(value for value in found if isinstance(value, float))
    return ", ".join([*(f"{value:g}" for value in numbers), *["none"] * (None in found)]) or "default"


def _data(pairs: Pairs) -> str:
    """Kinds of values and routings of problems, and what else was unusual; "special" is the corpus of that name."""
    problems = [origin for pair in pairs if (origin := _problem(*pair))]
    values, routings = ({problem.get(name) for problem in problems} for name in ("values", "routing"))
    kinds = [f"{len(found)} {name}" for name, found in (("values", values), ("routings", routings)) if len(found) > 1]
    kinds += ["special values"] * any("special values" in case.title for _, case in pairs)
    kinds += ["padding"] * any(problem.get("padding") for problem in problems)
    packed = {recording.specs[case.tensors["w13"]]["dtype"] for recording, case in pairs}
    kinds += ["packed and bf16 weights"] * (len(packed) > 1)
    given = {recording.specs[case.tensors["hidden_states"]]["dtype"] for recording, case in pairs}
    kinds += ["quantized before"] * any("float8" in dtype for dtype in given)
    return ", ".join(kinds)


def _problem(recording: Recording, case: Case) -> dict[str, Any] | None:
    origin = recording.specs[case.tensors["hidden_states"]]["from"]
    return origin["problem"] if origin["kind"] == "problem" else None


def _knobs(pairs: Pairs) -> str:
    """Settings, beside the scheme's own, that changed no bit."""
    told = [{name: value for name, value in case.config.items() if name not in _NO_KNOBS} for _, case in pairs]
    return str(len({repr(sorted(each.items())) for each in told if each}) or "")


def _ranks(pairs: Pairs) -> str:
    return ", ".join(str(n) for n in sorted({len(case.tokens_per_rank or [0]) for _, case in pairs}))


_PROPERTIES: tuple[tuple[str, Callable[[Pairs], str]], ...] = (
    ("T", _size("topk_ids", 0)),
    ("top-k", _size("topk_ids", 1)),
    ("E", _size("w13", 0)),
    ("H", _size("hidden_states", 1)),
    ("I", _size("w13", 1, 0.5)),
    ("clamp", _clamps),
    ("data", _data),
    ("knobs", _knobs),
    ("ranks", _ranks),
)
