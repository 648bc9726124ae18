"""The reference as the adapter's kernel: the same layouts, the same shared workspace, no GPU.

It keeps its weights in the layout of FlashInfer's kernel and turns them back at every launch, so that what is written
into them, such as experts permuted by EPLB, takes effect as it does on a GPU.
"""

from dataclasses import replace

import torch

from fp4ep.optimized.kernel_layouts import KERNEL_LAYOUTS, KernelState
from fp4ep.optimized.mega_kernel import KernelRequest, Vectors
from fp4ep.reference.exchange import Exchange, exchange_in_process
from fp4ep.reference.moe import moe_forward_ranks
from fp4ep.reference.scheme import Scheme, Weights
from fp4ep.reference.schemes import SCHEMES, find_scheme
from fp4ep.reference.types import MoEInputs, MoEWeights, Trace
from fp4ep.reference.weights import mxfp4_rewrite, quantize_leg

from .distributed import DistributedExchange

#: The vectors that a launch stages in the workspace of its geometry, which all layers of that geometry share.
Workspaces = dict[tuple, dict[str, torch.Tensor]]
_WORKSPACES: Workspaces = {}


class ReferenceKernel:
    """One layer of the reference on one rank. See `MegaKernel`; CPU tensors.

    request.ep_group: of several ranks needs its `device_group`, a torch.distributed group of gloo. workspaces: those
    that layers share, by default those of the process; as in FlashInfer, a vector that a launch does not bring stays
    what an earlier launch brought. Raises ValueError for a backend that has no scheme, listing what has.
    """

    supports_output_view = False

    def __init__(self, request: KernelRequest, *, workspaces: Workspaces | None = None) -> None:
        spec, moe = request.spec, request.moe
        if spec.registry_name not in {scheme.name for scheme in SCHEMES}:
            there_is = f"there is {', '.join(sorted({scheme.name for scheme in SCHEMES}))}"
            raise ValueError(f"moe_backend: no reference for {moe.moe_backend} ({spec.registry_name}); {there_is}")
        self.scheme = find_scheme(spec.registry_name, **_options(request))
        self.trace: Trace | None = None  #: of the last launch
        group = request.ep_group
        self._rank, self._ep_size = group.rank_in_group, group.world_size
        self._exchange: Exchange = exchange_in_process
        if group.world_size > 1:
            self._exchange = DistributedExchange(group.device_group)
        self._sizes = {"hidden": moe.hidden_dim, "intermediate": moe.intermediate_size}
        self._layout = KERNEL_LAYOUTS[spec.kernel]
        self._layout_options = layout_options(request)
        weights = prepared_weights(self.scheme, canonical_weights(request))
        self._state = self._layout.pack(weights, **self._layout_options)
        geometry = (moe.moe_backend, moe.num_experts, moe.experts_per_token, moe.max_num_tokens, *self._sizes.values())
        shared = _WORKSPACES if workspaces is None else workspaces
        self._workspace = shared.setdefault((*geometry, self._ep_size), {}) if spec.alphas == "per forward" else {}

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
        *,
        view: bool = False,
    ) -> torch.Tensor:
        self._workspace.update((name, vector.clone()) for name, vector in vectors.items())
        trace = moe_forward_ranks(
            self.scheme,
            self._weights(),
            [MoEInputs(hidden_states, topk_ids, topk_weights)],
            ranks=(self._rank,),
            ep_size=self._ep_size,
            exchange=self._exchange,
        )
        self.trace = trace
        return trace["combine", self._rank].tensors["values"]

    def warmup(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        vectors: Vectors,
    ) -> None:
        self.forward(hidden_states, topk_ids, topk_weights, vectors)

    def state(self) -> KernelState:
        return self._state

    def destroy(self) -> None:
        pass

    def _weights(self) -> MoEWeights:
        weights = self._layout.unpack(self._state, **self._sizes, **self._layout_options)
        names = {"fc1_alpha": "w13_global_scale", "fc2_alpha": "w2_global_scale", "fc1_norm_const": "fc1_norm_const"}
        return replace(weights, **{names[name]: vector for name, vector in self._workspace.items()})


def canonical_weights(request: KernelRequest) -> MoEWeights:
    """The request's weights; alphas that the kernel keeps with its weights are their global scales."""
    given: dict[str, torch.Tensor | None] = dict(vars(request.weights))
    if request.spec.alphas == "in weights":
        given |= {"w13_global_scale": request.epilogue.fc1_alpha, "w2_global_scale": request.epilogue.fc2_alpha}
    return MoEWeights(**{name: tensor.detach() for name, tensor in given.items() if tensor is not None})


def layout_options(request: KernelRequest) -> dict[str, int]:
    """Options of the kernel's layout among the request's."""
    return {"kperm": request.options["nvfp4_kperm"]} if "nvfp4_kperm" in request.options else {}


def prepared_weights(scheme: Scheme, weights: MoEWeights) -> MoEWeights:
    """The weights as the backend's preparation leaves them before it lays them out.

    Dense ones are quantized, unless the kernel multiplies bf16; MXFP4's are rewritten to what its operand can hold.
    """
    if scheme.weights is Weights.MXFP4:
        rewritten = [mxfp4_rewrite(getattr(weights, leg), getattr(weights, leg + "_scale")) for leg in ("w13", "w2")]
        return MoEWeights(*(codes for codes, _ in rewritten), *(scale for _, scale in rewritten))
    if weights.quantized or scheme.weights is Weights.BF16:
        return weights
    legs = [[quantize_leg(scheme, expert, leg) for expert in getattr(weights, leg)] for leg in ("w13", "w2")]
    columns = [[_stacked(column) for column in zip(*leg, strict=True)] for leg in legs]
    return MoEWeights(*(tensor for same in zip(*columns, strict=True) for tensor in same))


def _stacked(tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None


def _options(request: KernelRequest) -> dict[str, object]:
    """Arguments of find_scheme for what the request asks of the kernel."""
    options = {"gate_up_clamp": request.moe.swiglu_limit, **request.options}
    if request.spec.late_routing_weights:
        options["apply_routing_weights_before_fc2"] = request.apply_topk_in_fc1
    if request.spec.norm_consts:
        options["input_norm_const"] = request.epilogue.input_norm_const
    return options
