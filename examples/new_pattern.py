"""Teaching the pass a spelling that it does not know, without changing it.

Run it with `python examples/new_pattern.py`. The pass matches the ops that PyTorch makes of most spellings. Where yours
becomes something else, rewrite that into a spelling that the pass knows, in a pass of your own that runs earlier. Here
the model takes the rows by `torch.gather`, with the slot repeated for every element of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from inductor_passes import Condition, Report, SnapshotElimination, inductor_options
from mamba_ops import build_chunk_metadata, ssd_chunk_scan

NHEADS, HEADDIM, DSTATE, CHUNK_SIZE, NTOKENS = 4, 32, 32, 64, 24
METADATA = build_chunk_metadata([0, 16, 24], CHUNK_SIZE, context_lens=[100, 0])
aten = torch.ops.aten


def model(x: Tensor, state_cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    """A scan whose snapshot is spelled in an unusual way."""
    repeated = slots[:, None, None, None].expand(-1, NHEADS, HEADDIM, DSTATE)
    rows = state_cache.gather(0, repeated)
    initial = torch.where(has[:, None, None, None], rows, 0)
    dt, A = torch.full((NTOKENS, NHEADS), 0.1), torch.full((NHEADS,), -1.0)
    B = C = torch.ones(NTOKENS, 1, DSTATE)
    states = {"initial_states": initial, "state_cache": state_cache, "write_slots": slots}
    return ssd_chunk_scan(x, dt, A, B, C, METADATA, **states).out  # type: ignore[arg-type]


class GatherOfWholeRows(CustomGraphPass):
    """Turns `cache.gather(0, slots.expand(...))` into `cache[slots]`, where both are the same rows."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite one graph in place."""
        for node in graph.find_nodes(op="call_function", target=aten.gather.default):
            cache, dim, repeated = node.args[:3]
            assert isinstance(cache, fx.Node)
            assert isinstance(repeated, fx.Node)
            if dim != 0 or not self.is_one_slot_a_row(cache.meta["val"], repeated.meta["val"]):
                continue  # when in doubt leave it alone: a snapshot that stays costs time, a wrong one the result
            with graph.inserting_before(node):
                slots = repeated
                for _ in range(3):
                    before, slots = slots, graph.call_function(aten.select.int, (slots, -1, 0))
                    slots.meta["val"] = aten.select.int(before.meta["val"], -1, 0)
                rows = graph.call_function(aten.index.Tensor, (cache, [slots]))
            rows.meta = node.meta  # above all "val", the shape and dtype that later passes go by
            node.replace_all_uses_with(rows)
            graph.erase_node(node)

    @staticmethod
    def is_one_slot_a_row(cache: Tensor, repeated: Tensor) -> bool:
        """Whether every element of a row has the same index, and rows are taken whole."""
        return repeated.stride()[1:] == (0, 0, 0) and repeated.shape[1:] == cache.shape[1:]

    def uuid(self) -> bytes:
        """What tells compile caches that this pass has changed."""
        return get_hash_for_files((__file__,))


def compile_and_run(own_pass: CustomGraphPass | None) -> tuple[Tensor, Tensor, Report]:
    """Output, cache and report of the compiled model."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(6, NHEADS, HEADDIM, DSTATE, generator=generator)
    x = torch.randn(NTOKENS, NHEADS, HEADDIM, generator=generator)
    elimination = SnapshotElimination()
    # The pass runs last, after Inductor's own patterns; yours may run first, on the same graph.
    options = inductor_options(elimination) | {"post_grad_custom_pre_pass": own_pass, "fx_graph_cache": False}
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, options=options)
    out = compiled(x, cache, torch.tensor([4, 1]), torch.tensor([True, False]))
    return out, cache, elimination.report()


def main() -> None:
    """Compile without and with the new pattern."""
    *expected, report = compile_and_run(None)
    print(f"without the pattern: {report}\n")
    assert report.count() == {Condition.OTHER_CACHE: 1}

    *found, report = compile_and_run(GatherOfWholeRows())
    print(f"with the pattern: {report}\n")
    assert report.eliminated == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    print("The output and the cache are equal bit for bit.")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
