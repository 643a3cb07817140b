"""Which graph vLLM's manager chooses for a step once it has ours. Not a test: `test_full_steps` runs it where vLLM is.

python choose_graphs.py MODEL MODE prints, as JSON, for each step the kind of graph, its tokens, its requests, and
whether it is ours; and of all graphs that are captured the tokens, the requests and whether they are ours.
"""

import json
import os
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from inductor_passes.vllm import full_steps
from inductor_passes.vllm.contract import missing_from_graphs
from inductor_passes.vllm.full_tables import FullTables

# Requests, tokens, and tokens of each request if all are decodes.
STEPS = {
    "decodes": (3, 3, 1),
    "as many decodes as may be": (32, 32, 1),
    "a short prefill": (1, 32, None),
    "a few of both": (3, 20, None),
    "prefills beside decodes": (5, 40, None),
    "too long": (1, 65, None),
    "longer than any graph": (1, 200, None),
    "a prompt of one token": (1, 1, None),
    "two prompts of one token": (2, 2, None),
    "prompts of one token beside decodes": (5, 5, None),
    "a prompt of two tokens beside decodes": (5, 6, None),
}


def main() -> None:
    config = EngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=32
    ).create_engine_config()
    compilation = config.compilation_config
    mode = CUDAGraphMode[sys.argv[2]]
    sizes = [1, 2, 4, 8, 16, 32, 64] if mode == CUDAGraphMode.FULL else [1, 2, 4, 8, 16, 32, 64, 128]
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]
    if not torch.cuda.is_available():
        type(current_platform)._global_graph_pool = (0, 0)  # nothing is captured here
    tables = FullTables(64, 32, 64, torch.device("cpu"), pinned=False)
    steps = full_steps.FullSteps(tables, [2, 4, 8, 16, 32, 64])
    full_steps._known[id(compilation.static_forward_context)] = steps
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        from inductor_passes.vllm.full_graphs import FullStepManager

        manager = FullStepManager(config, torch.device("cpu"), mode, 1)
    manager._graphs_captured = True
    found = {}
    for offered in (True, False):
        manager.offer(offered)
        for name, (num_reqs, num_tokens, uniform) in STEPS.items():
            graph = manager.dispatch(num_reqs, num_tokens, uniform, 0)
            found[f"{name}{'' if offered else ', not offered'}"] = (
                graph.cg_mode.name,
                graph.num_tokens,
                graph.num_reqs,
                graph in manager._ours,
            )
    full = manager._capture_descs[CUDAGraphMode.FULL]
    captured = [(graph.num_tokens, graph.num_reqs, graph in manager._ours) for graph in full]
    print("RESULT", json.dumps({"missing": missing_from_graphs(), "chosen": found, "captured": captured}))


if __name__ == "__main__":
    main()
