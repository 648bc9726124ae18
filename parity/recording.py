"""Recordings: what a real kernel was given and what it returned, in one safetensors file.

The header's metadata has one entry, `fp4ep`, a JSON object:

    format    "fp4ep.recording"
    version   1
    title     what was recorded and why
    source    hardware, compute_capability, and the versions of what ran: flashinfer, cutlass_dsl, torch, driver
    tensors   name -> {dtype, shape, sha256, from}; `from` says where the tensor is:
                {"kind": "stored", "encoding": "raw" or "xz"}              in this file, under its name
                {"kind": "generated", "generator": g, "arguments": {...}}   `fp4ep.parity.generate`
                {"kind": "quantized", "rule": r, "of": name, "part": p}     a dense tensor of this recording, quantized
                {"kind": "problem", "problem": {...}, "part": p}            "weights.w13", "inputs.topk_ids", ... of a
                                                                            `Problem`, the tokens of all its ranks
    cases     a list of `Case` objects

"xz" holds the tensor's bytes, all first bytes of the elements, then all second bytes and so on, as one xz stream.
sha256 is over the tensor's own little-endian bytes and is checked whenever a tensor is read. dtype is torch's name.
Readers refuse a version they do not know.
"""

import hashlib
import json
import lzma
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp4ep.reference.formats import E2M1, pack_e2m1
from fp4ep.reference.quantize import Quantized, quantize_mx, quantize_nvfp4
from fp4ep.reference.scales import ScaleRule

from .generate import GENERATORS

if TYPE_CHECKING:
    from .problem import Layer, Problem  # which needs this module

FORMAT = "fp4ep.recording"
VERSION = 1

QUANTIZERS = {
    "nvfp4": quantize_nvfp4,
    "mxfp4_floor": lambda values: quantize_mx(values, E2M1, ScaleRule.FLOOR),
}


class RecordingError(ValueError):
    """A file is not a recording, is of another version, or does not hold what it says."""


#: Kind of a case -> the role of what the kernel gave; of its digests where "_rows" follows.
GIVEN = {"moe": "output", "tensor_core": "d", "special_function": "y"}


@dataclass(frozen=True)
class Case:
    """One run of one kernel (kind "moe"), one chain of tensor-core instructions ("tensor_core"), or one instruction
    applied to many arguments ("special_function").

    tensors: role -> tensor name. For moe: hidden_states, topk_ids, topk_weights, w13, w2, where given scales,
    w13_scale, w2_scale, w13_global_scale, w2_global_scale; and output. previous_topk_ids, where present: the routing of
    an earlier launch on the same buffers, all else equal. With several EP ranks: the tokens of all, rank after rank.
    For tensor_core: a `[M, K]`, b `[N, K]`, maybe c, and d `[M, N]`; a and b in codes of the operand format, or values
    of its dtype.
    For special_function: x and y, float32. In place of what the kernel gave, output, d or y, there may be its
    `row_digests`: output_rows, d_rows or y_rows.
    """

    title: str
    kind: str
    scheme: str  #: FlashInfer's registry name, the tensor core's name, or the PTX instruction
    tensors: dict[str, str]
    options: dict[str, object] = field(default_factory=dict)  #: arguments of find_scheme
    config: dict[str, object] = field(default_factory=dict)  #: what else the kernel was told; decides no bits
    launches: int = 1  #: runs that gave these same bits

    @property
    def tokens_per_rank(self) -> list[int] | None:
        """How the tokens were spread over EP ranks, in order; None: all on one."""
        return self.config.get("tokens_per_rank")  # type: ignore[return-value]


class Recording:
    """An open recording. Tensors are read, rebuilt and checked on first use."""

    def __init__(self, path: str | Path) -> None:
        """Raises RecordingError when the file is not a recording of a known version, FileNotFoundError as usual."""
        self.path = Path(path)
        try:
            with safe_open(self.path, "pt") as file:
                header = json.loads((file.metadata() or {})["fp4ep"])
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            version = header["version"]
            if version == VERSION:
                self.title: str = header["title"]
                self.source: dict[str, str] = header["source"]
                self.cases = [Case(**case) for case in header["cases"]]
                self.specs: dict[str, dict] = header["tensors"]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{self.path}: not an fp4ep recording ({error!r})") from error
        if version != VERSION:
            raise RecordingError(f"{self.path}: recording version {version!r}; this fp4ep reads {VERSION}")
        self._loaded: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises RecordingError when it is missing, unreadable or not what was recorded."""
        if name not in self.specs:
            raise RecordingError(f"{self.path}: no tensor {name!r}")
        if name not in self._loaded:
            spec = self.specs[name]
            try:
                tensor = self._build(name, spec)
                if _describe(tensor) != (spec["dtype"], spec["shape"]) or sha256(tensor) != spec["sha256"]:
                    raise ValueError("its dtype, shape or checksum is not the recorded one")
            except RecordingError:
                raise  # about the tensor this one is made from
            except (SafetensorError, lzma.LZMAError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise RecordingError(f"{self.path}: tensor {name!r} cannot be read: {error!r}") from error
            self._loaded[name] = tensor
        return self._loaded[name]

    def forget(self) -> None:
        """Drop the tensors read so far."""
        self._loaded.clear()

    def roles(self, case: Case) -> dict[str, torch.Tensor]:
        return {role: self[name] for role, name in case.tensors.items()}

    def _build(self, name: str, spec: dict) -> torch.Tensor:
        origin = spec["from"]
        dtype = getattr(torch, spec["dtype"])
        if origin["kind"] == "stored":
            with safe_open(self.path, "pt") as file:
                stored = file.get_tensor(name)
            return stored if origin["encoding"] == "raw" else _unpack(stored, dtype, spec["shape"])
        if origin["kind"] == "generated":
            return GENERATORS[origin["generator"]](**origin["arguments"])
        if origin["kind"] == "quantized":
            return quantized_part(QUANTIZERS[origin["rule"]](self[origin["of"]]), origin["part"])
        if origin["kind"] == "problem":
            return problem_part(origin["problem"], origin["part"])
        raise ValueError(f"unknown origin {origin['kind']!r}")


class RecordingWriter:
    """Collects tensors and cases, then writes them at once."""

    def __init__(self, title: str, source: Mapping[str, str]) -> None:
        self.header = {"format": FORMAT, "version": VERSION, "title": title, "source": dict(source)}
        self.specs: dict[str, dict] = {}
        self.stored: dict[str, torch.Tensor] = {}
        self.cases: list[Case] = []

    def store(self, name: str, tensor: torch.Tensor, encoding: str = "raw") -> torch.Tensor:
        tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.stored[name] = tensor if encoding == "raw" else _pack(tensor)
        return self._add(name, tensor, {"kind": "stored", "encoding": encoding})

    def generate(self, name: str, generator: str, **arguments) -> torch.Tensor:
        tensor = GENERATORS[generator](**arguments)
        return self._add(name, tensor, {"kind": "generated", "generator": generator, "arguments": arguments})

    def quantize(self, name: str, rule: str, of: str, part: str, dense: torch.Tensor) -> torch.Tensor:
        tensor = quantized_part(QUANTIZERS[rule](dense), part)
        return self._add(name, tensor, {"kind": "quantized", "rule": rule, "of": of, "part": part})

    def problem(self, name: str, problem: dict, part: str) -> torch.Tensor:
        """problem: as JSON."""
        return self._add(name, problem_part(problem, part), {"kind": "problem", "problem": problem, "part": part})

    def problem_roles(self, prefix: str, problem: "Problem", layer: "Layer") -> dict[str, str]:
        """Every tensor of the layer that a problem builds: role -> name here, prefix.role."""
        roles = {}
        for part, owner in (("weights", layer.weights), ("inputs", layer.inputs[0])):
            for role in [role for role, tensor in vars(owner).items() if tensor is not None]:
                roles[role] = f"{prefix}.{role}"
                self.problem(roles[role], problem.as_json(), f"{part}.{role}")
        return roles

    def _add(self, name: str, tensor: torch.Tensor, origin: dict) -> torch.Tensor:
        dtype, shape = _describe(tensor)
        self.specs[name] = {"dtype": dtype, "shape": shape, "sha256": sha256(tensor), "from": origin}
        return tensor

    def write(self, path: str | Path) -> None:
        """Write the file, replacing an older one only when the new one is complete."""
        header = self.header | {"tensors": self.specs, "cases": [asdict(case) for case in self.cases]}
        write_safetensors(self.stored, path, header)


def alike(launches: Sequence[torch.Tensor]) -> bool:
    """Whether launches of a kernel gave the same bf16 bits."""
    return all(torch.equal(launches[0].view(torch.int16), other.view(torch.int16)) for other in launches[1:])


def row_digests(tensor: torch.Tensor) -> torch.Tensor:
    """`[rows]` int64: the 8-byte BLAKE2b digest of each row's little-endian bytes.

    Stands for an output that is too large to store: it says which rows differ, not which elements.
    """
    rows = _bytes(tensor.detach().cpu()).reshape(len(tensor), -1 if len(tensor) else 0).numpy()
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return torch.from_numpy(np.frombuffer(digests, "<i8").copy())


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: str | Path, header: Mapping) -> None:
    """Write tensors and their JSON header, replacing an older file only when the new one is complete."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # of this file and this process only
    try:
        save_file(dict(tensors), partial, metadata={"fp4ep": json.dumps(header)})
        partial.chmod(0o644)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def quantized_part(quantized: Quantized, part: str) -> torch.Tensor:
    """part: "codes" (two E2M1 per byte), "scales" or "global_scale"."""
    tensor = pack_e2m1(quantized.codes) if part == "codes" else getattr(quantized, part)
    return tensor.contiguous()


def problem_part(problem: dict, part: str) -> torch.Tensor:
    """part: "weights." or "inputs." and a field of MoEWeights or MoEInputs."""
    layer = problem_layer(problem)
    owner, name = part.split(".")
    owners = [layer.weights] if owner == "weights" else layer.inputs
    return torch.cat([getattr(each, name) for each in owners])


def problem_layer(problem: dict) -> "Layer":
    """The layer of a problem, as JSON; the last one is kept."""
    return _layer(json.dumps(problem, sort_keys=True))


@lru_cache(maxsize=1)
def _layer(problem: str):
    from .problem import Problem  # which needs this module

    return Problem.from_json(json.loads(problem)).build()


def _describe(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy().tobytes()).hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`[elements, itemsize]` uint8, little endian as every platform torch runs on."""
    assert sys.byteorder == "little"
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, tensor.element_size())


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    planes = _bytes(tensor).T.contiguous().numpy().tobytes()
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]
    return torch.from_numpy(np.frombuffer(lzma.compress(planes, lzma.FORMAT_XZ, filters=filters), np.uint8).copy())


def _unpack(stored: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    planes = torch.from_numpy(np.frombuffer(lzma.decompress(stored.numpy().tobytes()), np.uint8).copy())
    return planes.reshape(dtype.itemsize, math.prod(shape)).T.contiguous().reshape(-1).view(dtype).reshape(shape)
