"""Small synthetic checkpoints, one layer a time, in every convention."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
E, H, I = 4, 256, 128  # noqa: E741

HF_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
DEEPSEEK_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
#: weight_scale_2 of an expert with amax 0.5.
SCALE_2 = 0.5 / (6 * 448)


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Packed E2M1 codes, with a 6 in every byte pair so that no block is zero."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    out[..., ::2] = 0x77
    return out


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal, positive E4M3 scales up to 448, which is the first."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randint(0x38, 0x7F, shape, dtype=torch.uint8, generator=generator)
    out.view(-1)[0] = 0x7E
    return out.view(torch.float8_e4m3fn)


def ue8m0(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)


def shapes(h: int = H, i: int = I) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the unpacked projections."""
    return {"gate": (i, h), "up": (i, h), "down": (h, i)}


def modelopt(prefix: str = "model.layers.3.mlp.experts", e: int = E, h: int = H, i: int = I, names=HF_NAMES) -> Tensors:
    out: Tensors = {}
    for expert in range(e):
        for n, (projection, (rows, columns)) in enumerate(shapes(h, i).items()):
            seed, at = 10 * expert + n, f"{prefix}.{expert}.{names[projection]}"
            out[f"{at}.weight"] = codes(rows, columns // 2, seed=seed)
            out[f"{at}.weight_scale"] = e4m3(rows, columns // 16, seed=seed)
            out[f"{at}.weight_scale_2"] = torch.tensor(SCALE_2 * (1 + expert) * (2 if projection == "down" else 1))
            out[f"{at}.input_scale"] = torch.tensor(0.01 if projection != "down" else 0.02 * (1 + expert))
    return out


def compressed_tensors(prefix: str = "model.layers.3.mlp.experts", **sizes: int) -> Tensors:
    """The same weights as `modelopt`: global scales are reciprocals, of shape [1]."""
    renamed = {
        "weight": "weight_packed",
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    }
    out: Tensors = {}
    for name, tensor in modelopt(prefix, **sizes).items():
        at, _, suffix = name.rpartition(".")
        scalar = tensor.dim() == 0
        out[f"{at}.{renamed[suffix]}"] = (1 / tensor).reshape(1) if scalar else tensor
    return out


def fused_modelopt(prefix: str = "model.layers.3.mlp.experts") -> Tensors:
    """The same weights as `modelopt`, one tensor for all experts."""
    each = modelopt(prefix)
    out: Tensors = {}
    for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        tail = "" if suffix == "weight" else f"_{suffix}"
        part = [[each[f"{prefix}.{x}.{p}.{suffix}"] for p in HF_NAMES.values()] for x in range(E)]
        flat = [[t.view(torch.uint8) if t.dim() else t for t in row] for row in part]
        join = torch.stack if flat[0][0].dim() == 0 else torch.cat
        dtype = part[0][0].dtype
        out[f"{prefix}.gate_up_proj{tail}"] = torch.stack([join(row[:2]) for row in flat]).view(dtype)
        out[f"{prefix}.down_proj{tail}"] = torch.stack([row[2] for row in flat]).view(dtype)
    return out


def mxfp4(prefix: str = "layers.3.ffn.experts", names=DEEPSEEK_NAMES, suffixes=("weight", "scale")) -> Tensors:
    """As DeepSeek-V4: int8 codes, UE8M0 scales."""
    out: Tensors = {}
    for expert in range(E):
        for n, (projection, (rows, columns)) in enumerate(shapes().items()):
            seed, at = 10 * expert + n, f"{prefix}.{expert}.{names[projection]}"
            out[f"{at}.{suffixes[0]}"] = codes(rows, columns // 2, seed=seed).view(torch.int8)
            out[f"{at}.{suffixes[1]}"] = ue8m0(rows, columns // 32, seed=seed)
    return out


def compressed_tensors_mxfp4() -> Tensors:
    out = mxfp4("model.layers.3.mlp.experts", HF_NAMES, ("weight_packed", "weight_scale"))
    return {name: tensor.view(torch.uint8) for name, tensor in out.items()}


def gpt_oss(prefix: str = "model.layers.3.mlp.experts") -> Tensors:
    return {
        f"{prefix}.gate_up_proj_blocks": codes(E, 2 * I, H // 32, 16),
        f"{prefix}.gate_up_proj_scales": ue8m0(E, 2 * I, H // 32).view(torch.uint8),
        f"{prefix}.gate_up_proj_bias": torch.zeros(E, 2 * I, dtype=torch.bfloat16),
        f"{prefix}.down_proj_blocks": codes(E, H, I // 32, 16),
        f"{prefix}.down_proj_scales": ue8m0(E, H, I // 32).view(torch.uint8),
        f"{prefix}.down_proj_bias": torch.zeros(E, H, dtype=torch.bfloat16),
    }


def write(folder: Path, *shards: Tensors, index: bool = True) -> Path:
    """One file for each shard, and the index."""
    weight_map = {}
    for n, tensors in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Over two shards, so that every expert is split."""
    items = list(tensors.items())
    return dict(items[::2]), dict(items[1::2])
