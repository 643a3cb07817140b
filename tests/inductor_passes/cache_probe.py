"""Compile one program with and without the pass against a cache folder, and print what came from where, as JSON.

Its own process, so that nothing but the folder (TORCHINDUCTOR_CACHE_DIR) can hand a graph on.
"""

import json
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir

from inductor_passes import SnapshotElimination, inductor_options
from mamba_ops.ops import state_passing_update
from tests.inductor_passes.programs import make_inputs, snapshot


def program(states, dA, last, cache, slots, has):
    """One snapshot that goes, and one that is crossed."""
    first = state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots)
    return first, state_passing_update(states, dA, last, snapshot(cache, slots.flip(0), has), cache, slots)


def probe(options):
    """Compile, and see what runs."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    inputs = make_inputs((2, 1), (True, True))
    code_before = set(Path(cache_dir()).rglob("*.py"))
    compiled = torch.compile(program, fullgraph=True, options=options)
    compiled(*inputs.clone().args())
    with torch.profiler.profile() as profile:
        output = compiled(*inputs.args())
    return {
        "hit": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"] > 0,
        "new_code": len(set(Path(cache_dir()).rglob("*.py")) - code_before),
        "ops": sorted({event.key for event in profile.key_averages() if event.key.startswith("mamba_ops::")}),
        "bytes": [tensor.view(torch.uint8).sum().item() for tensor in (*output, inputs.cache)],
    }


if __name__ == "__main__":
    settings = {
        "with": inductor_options(),
        "without": None,
        "whole only": inductor_options(SnapshotElimination(masked_gather=False)),
    }
    print(json.dumps({name: probe(options) for name, options in settings.items()}))
