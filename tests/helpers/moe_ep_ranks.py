"""An adapter over the reference on every rank, experts moved between ranks: what each process runs, over gloo."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from moe_ep_layers import moe_ep_layer

from fp4ep.optimized.config import EpGroup
from fp4ep.parity.processes import Tell
from fp4ep.parity.reference_kernel import ReferenceKernel

TOKENS = {1: (20,), 2: (12, 7), 4: (5, 0, 9, 3)}


def gloo_rank(rank: int, folder: Path, tell: Tell) -> None:
    backend, size = torch.load(folder / "job", weights_only=False)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    layer = moe_ep_layer(*backend, tokens=TOKENS[size], group=EpGroup(size, rank, dist.group.WORLD))
    adapter = layer.adapter(ReferenceKernel)
    tell(rank, *layer.rebalanced(adapter))
    adapter.destroy()
    dist.destroy_process_group()
