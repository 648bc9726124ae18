"""The CPU engine in the kernel's place, in worker processes: FlashInfer's options become those of the scheme."""

import torch

from fp4ep.optimized.engine_cpu import fast_forward
from fp4ep.reference import find_scheme
from fp4ep.reference.exchange import exchange_in_process


def launch(scheme, options, weights, inputs, *, max_tokens_per_rank):
    """Three launches, of which the last differs for three tokens; one token ends the process."""
    assert len(inputs.hidden_states) <= max_tokens_per_rank
    if len(inputs.hidden_states) == 1:
        raise SystemExit(9)
    known = {name: value for name, value in options.items() if name not in ("knobs", "token_back_mode")}
    trace = fast_forward(
        find_scheme(scheme, **known), weights, [inputs], ranks=[0], ep_size=1, exchange=exchange_in_process
    )
    output = torch.cat([stage.tensors["values"] for stage in trace if stage.name == "combine"])
    return [output, output, output + 1 if len(output) == 3 else output]
