"""safetensors files on disk: what they hold, from their headers, and tensors of them, when asked for."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: Bits of an element, by the dtype's name in a safetensors header.
_BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BF16": 16, "F16": 16, "F32": 32}
#: The format's own limit.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as its file's header describes it. dtype: the safetensors name, such as U8 or F8_E4M3."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _BITS.get(self.dtype, 64) // 8

    def read(self, part: slice | None = None) -> torch.Tensor:
        """The tensor, or some entries of its first dimension: nothing else of the file is read.

        Raises ValueError, naming file and tensor, when the file is damaged.
        """
        try:
            file = _open(self.file, self.file.stat().st_mtime_ns)
            return file.get_tensor(self.name) if part is None else file.get_slice(self.name)[part]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file}: tensor {self.name!r} cannot be read: {error}") from error


@lru_cache(maxsize=8)
def _open(file: Path, changed: int):
    """A handle, kept: opening parses the whole header. changed: tells a file from one written over it later."""
    return safe_open(file, "pt")


class Shards(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by name. A shard's header is read when one of its tensors is first asked for."""

    def __init__(self, files: Mapping[str, Path]):
        self._files = files
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        """Raises KeyError for an unknown name, ValueError where the file is missing, damaged or lacks the tensor."""
        file = self._files[name]
        if file not in self._headers:
            self._headers[file] = read_header(file)
        if name not in self._headers[file]:
            raise ValueError(f"{file}: the index puts tensor {name!r} here, but the file lacks it")
        return self._headers[file][name]

    def __iter__(self):
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(set(self._files.values())))


def find_shards(path: Path) -> Shards:
    """The tensors of one safetensors file, or of a folder of them, with or without model.safetensors.index.json.

    With an index only the index is read, without one the headers of all files. Raises ValueError when there is no such
    file, the index is not one, or two files hold the same name.
    """
    if path.is_file():
        return _from_headers([path])
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return Shards({name: path / file for name, file in weight_map.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index: {error!r}") from error
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files:
        reason = f"has neither {INDEX} nor a {_SUFFIX} file" if path.is_dir() else "does not exist"
        raise ValueError(f"{path}: {reason}")
    return _from_headers(files)


def _from_headers(files: list[Path]) -> Shards:
    found: dict[str, Path] = {}
    headers = {file: read_header(file) for file in files}
    for file, header in headers.items():
        for name in header:
            if name in found:
                raise ValueError(f"tensor {name!r} is in two files, {found[name]} and {file}, and there is no index")
            found[name] = file
    shards = Shards(found)
    shards._headers.update(headers)
    return shards


def read_header(file: Path) -> dict[str, StoredTensor]:
    """What a safetensors file says that it holds. Raises ValueError when it is missing or its header is damaged."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        return {
            name: StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError as error:
        raise ValueError(f"{file}: the file is missing") from error
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error


def read_json(path: Path) -> dict:
    """A JSON object beside the shards; empty where there is no such file. Raises ValueError when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
