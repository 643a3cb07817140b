"""Our builder of metadata beside vLLM's own, on random batches. Not a test: `test_metadata` runs it where vLLM is.

python compare_metadata.py MODEL DEVICE prints, as JSON, for each way in which vLLM keeps states: how many batches there
were of each kind, how many of them ours built with one copy to the device, and which fields differed.
"""

import contextlib
import dataclasses
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from inductor_passes.vllm.full_steps import FullSteps, GroupSlots
from inductor_passes.vllm.full_tables import FullTables
from inductor_passes.vllm.metadata_builder import FastMamba2MetadataBuilder

CHUNK, BLOCK, HASH_BLOCK, MOST = 64, 128, 64, 1024
GROUPS = 3
BATCHES = 150
CASES: dict[str, dict[str, Any]] = {
    "states of requests": {"mode": "none"},
    "states of blocks": {"mode": "align"},
    "set by the runner": {"mode": "align", "runner": True},
    "with checkpoints": {"mode": "align", "runner": True, "checkpoints": True},
    "in whole steps": {"mode": "align", "runner": True, "full": True, "graphs": CUDAGraphMode.FULL_AND_PIECEWISE},
    "in whole steps alone": {"mode": "align", "runner": True, "full": True, "graphs": CUDAGraphMode.FULL},
    "decodes in graphs": {"mode": "align", "runner": True, "graphs": CUDAGraphMode.FULL_AND_PIECEWISE},
    "decodes in graphs, states of requests": {"mode": "none", "graphs": CUDAGraphMode.FULL_AND_PIECEWISE},
    "with drafts": {"mode": "align", "runner": True, "drafts": 2},
}


def random_batch(rng: random.Random) -> tuple[list[int], list[int], list[bool]]:
    """Lengths, contexts and whether each is in a prompt: decodes, then short ends of prompts, then prefills."""

    def near(*edges: int) -> int:
        return max(0, rng.choice(edges) + rng.randint(-2, 2))

    rows = [(1, near(1, CHUNK, BLOCK, 300), False) for _ in range(rng.choice((0, 0, 1, 3)))]
    rows += [(1, near(1, CHUNK, 2 * BLOCK), True) for _ in range(rng.choice((0, 0, 1)))]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        length = max(1, rng.choice((near(1, 8, 32), near(CHUNK, 2 * CHUNK, 2 * BLOCK), rng.randint(1, 500))))
        rows.append((length, rng.choice((0, 0, near(CHUNK, BLOCK), rng.randrange(4) * CHUNK)), True))
    rows = rows or [(1, 3, False)]
    rows += [(0, 0, False)] * rng.choice((0, 0, 2))  # padding
    lengths, contexts, is_prefilling = zip(*rows, strict=True)
    return list(lengths), list(contexts), list(is_prefilling)


def is_whole_step(batch: Any) -> bool:
    """Whether the step is replayed as one graph of ours."""
    return len(batch[0]) < sum(batch[0]) <= CHUNK


def is_short(batch: Any) -> bool:
    """Only decodes have padding: that of other steps is added where a whole step is one graph."""
    return sum(batch[0]) <= CHUNK and (0 not in batch[0] or not (any(batch[2]) or max(batch[0]) > 1))


def is_built_by_vllm(case: dict[str, Any], step: int) -> bool:
    """Whether our builder is given what it does not know; a graph of ours is replayed nevertheless."""
    return case.get("full", False) and step % 7 == 6


def of_one_token() -> list[tuple[list[int], list[int], list[bool]]]:
    """First tokens of prompts, alone and beside decodes; and decodes, padded or not."""
    return [
        ([1] * ndecodes + [1] * nprompts, [5] * ndecodes + [0] * nprompts, [False] * ndecodes + [True] * nprompts)
        for ndecodes in (0, 1, 3)
        for nprompts in (1, 2)
    ] + [
        ([1] * ndecodes + [0] * padding, [70] * ndecodes + [0] * padding, [False] * (ndecodes + padding))
        for ndecodes in (1, 3)
        for padding in (0, 5)
    ]


def common(batch: Any, tables: list[torch.Tensor], device: torch.device, group: int = 0) -> CommonAttentionMetadata:
    lengths, contexts, is_prefilling = batch
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([length + context for length, context in zip(lengths, contexts, strict=True)]).int()
    ntokens = sum(lengths)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=ntokens,
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=tables[group],
        slot_mapping=torch.zeros(ntokens, dtype=torch.int64, device=device),
        is_prefilling=torch.tensor(is_prefilling),
    )


def values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.device), list(value.shape), value.tolist()
    if isinstance(value, dict):
        return {str(name): values(entry) for name, entry in value.items() if name in (8, *TILE_FIELDS)}
    if dataclasses.is_dataclass(value):
        return {field.name: values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


TILE_FIELDS = ("nums", "tot", "mlist", "mlist_len", "offsetlist", "batch_ptr", "token_chunk_offset_ptr")


def steps(builders: list[Any], batches: list[Any], case: dict[str, Any], device: torch.device) -> list[list[Any]]:
    """For each batch the metadata of each group, as a runner has it built."""
    spec, rng, pads = builders[0].kv_cache_spec, random.Random(1), random.Random(2)
    built = []
    for step, batch in enumerate(batches):
        is_whole = getattr(builders[0], "_full", None) is not None and is_whole_step(batch)
        by_vllm = is_built_by_vllm(case, step)
        padding = pads.randint(0, 3) if is_whole and not by_vllm else 0
        nrows, columns = len(batch[0]), 1 if case["mode"] == "none" else 2 + MOST // BLOCK + spec.num_speculative_blocks
        tables = []
        for _ in builders:
            table = torch.tensor(rng.sample(range(1, 10_000), nrows * columns), dtype=torch.int32)
            tables.append(table.view(nrows, columns).to(device))
        given = {}
        if case.get("drafts"):
            first = next((i for i, is_prefilling in enumerate(batch[2]) if is_prefilling), nrows)
            accepted = torch.ones(nrows, dtype=torch.int32, device=device)
            given = {
                "num_accepted_tokens": accepted,
                "num_decode_draft_tokens_cpu": torch.tensor([0] * first + [-1] * (nrows - first), dtype=torch.int32),
            }
        groups: list[Any] = []
        if padding:  # up to the size of a graph
            batch = tuple([*column, *[0] * padding] for column in batch)
            tables = [torch.cat([table, table.new_full((padding, columns), 99)]) for table in tables]
            nrows += padding
        # The runner's rows are one behind the other, whatever their number.
        aligned = torch.zeros(len(builders), nrows + 1, 1, dtype=torch.int32, device=device)
        for group, builder in enumerate(builders):
            context = common(batch, tables, device, group)
            context.num_actual_tokens += padding
            if by_vllm:
                context.query_start_loc_cpu = context.query_start_loc_cpu.long()
            is_set = (
                case.get("runner") and step % 5 != 4 and not by_vllm
            )  # what was set for the step before must be forgotten
            if is_set and hasattr(builder, "mamba_aligned_state_indices"):
                slots = aligned[group, :nrows]
                slots.copy_(mamba_get_block_table_tensor(tables[group], context.seq_lens, spec, case["mode"]))
                builder.mamba_aligned_state_indices = slots
                if not case.get("checkpoints"):  # whoever looks into the table finds nothing there
                    tables[group].fill_(-7)
            with without_waiting(builder):
                if group and builder.supports_update_block_table:
                    groups.append(builder.update_block_table(groups[0], tables[group], context.slot_mapping))
                else:
                    groups.append(builder.build(0, context, **given))
        built.append(groups)
        if is_whole:
            check_whole_step(builders, groups, ntokens=sum(batch[0]), padding=padding)
    return built


@contextlib.contextmanager
def without_waiting(builder: Any) -> Iterator[None]:
    """On a GPU, an error if our builder waits for it."""
    if builder.device.type == "cpu" or not getattr(builder, "_is_fast", False):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_whole_steps(builders: list[Any], device: torch.device) -> None:
    """As if graphs of up to a chunk of tokens were captured: tables and slots are then written in each such step."""
    full = FullSteps(FullTables(CHUNK, 16, CHUNK, device, pinned=False), [CHUNK])
    for builder in builders:
        builder._full, builder._full_slots = full, GroupSlots(full, device)


def check_whole_step(builders: list[Any], groups: list[Any], ntokens: int, padding: int) -> None:
    """What a captured step would find is what the metadata says, and nothing for what is padding."""
    for builder, metadata in zip(builders, groups, strict=True):
        metadata.seq_lens = metadata.seq_lens[: metadata.num_reqs]
        slots, ndecodes = builder._full_slots, metadata.num_decodes
        requests = torch.cat([metadata.state_indices_tensor_d[:ndecodes, 0], metadata.state_indices_tensor_p])
        assert torch.equal(slots.of_requests[: requests.shape[0]], requests)
        assert torch.equal(slots.of_decodes[:ndecodes], requests[:ndecodes])
        assert not slots.of_decodes[ndecodes:].any()
        sizes = builder._full.tables.sizes(ntokens + padding, 16)
        starts = builder._full.tables.step(sizes, slots.of_requests).cu_seqlens[ndecodes : requests.shape[0] + 1]
        assert torch.equal(starts - ndecodes, metadata.query_start_loc_p)


def check_made_up_step(builders: list[Any], device: torch.device) -> None:
    """A graph that is replayed for no request, as vLLM does now and then, has to find none of the step before."""
    batch = ([1, 1, 7], [5, 5, 0], [False, False, True])
    tables = [torch.full((3, 2 + MOST // BLOCK), 7, dtype=torch.int32, device=device) for _ in builders]
    contexts = [common(batch, tables, device, group) for group in range(len(builders))]
    first = builders[0].build(0, contexts[0])
    for builder, context in zip(builders[1:], contexts[1:], strict=True):
        builder.update_block_table(first, context.block_table_tensor, context.slot_mapping)
    assert all(builder._full_slots.of_decodes.any() for builder in builders)
    first = builders[0].build_for_cudagraph_capture(contexts[0])
    for builder, context in zip(builders[1:], contexts[1:], strict=True):
        builder.update_block_table(first, context.block_table_tensor, context.slot_mapping)
    full, slots = builders[0]._full, builders[0]._full_slots
    assert not any(builder._full_slots.of_decodes.any() for builder in builders)
    assert not full.tables.step(full.tables.sizes(CHUNK, 16), slots.of_requests).cu_seqlens.any()


def in_one_buffer(metadata: Any) -> bool:
    tensors = (
        metadata.cu_chunk_seqlen_p,
        metadata.query_start_loc_p,
        metadata.has_initial_states_p,
        metadata.batch_ptr,
    )
    return None not in tensors and len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def shares(groups: list[Any]) -> bool:
    """What the layers' plan of a step takes for granted of the groups."""
    first, *others = groups
    return all(m.nums_dict is first.nums_dict and m.cu_chunk_seqlen_p is first.cu_chunk_seqlen_p for m in others)


def compare(config: VllmConfig, case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    config.cache_config.mamba_cache_mode = case["mode"]
    config.cache_config.mamba_block_size = BLOCK
    config.cache_config.hash_block_size = config.cache_config.cache_hit_alignment_tokens = HASH_BLOCK
    config.compilation_config.cudagraph_mode = case.get("graphs", CUDAGraphMode.NONE)
    spec = MambaSpec(
        block_size=BLOCK,
        shapes=((3, 8), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode=case["mode"],
        num_speculative_blocks=case.get("drafts", 0),
        num_prefill_checkpoint_blocks=int(case.get("checkpoints", False)),
        prefill_checkpoint_alignment=1 if case.get("checkpoints") else None,
    )
    both = [
        [builder(spec, [f"layer {group}"], config, device) for group in range(GROUPS)]
        for builder in (FastMamba2MetadataBuilder, Mamba2AttentionMetadataBuilder)
    ]
    for builder in both[0]:
        if case.get("runner") and not case.get("drafts"):
            # A builder for a GPU asks for it itself.
            assert device.type == "cpu" or hasattr(builder, "mamba_aligned_state_indices")
            builder.mamba_aligned_state_indices = None
    rng = random.Random(0)
    batches = [random_batch(rng) for _ in range(BATCHES)]
    if case.get("full"):
        batches = [batch for batch in (random_batch(rng) for _ in range(10 * BATCHES)) if is_short(batch)]
        for number, batch in enumerate(of_one_token()):  # in between, after steps of every kind
            batches.insert(11 * number + 5, batch)
        capture_whole_steps(both[0], device)
    ours, theirs = (steps(builders, batches, case, device) for builders in both)
    if case.get("full"):
        check_made_up_step(both[0], device)
    wrong: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        for one, other in zip(mine, expected, strict=True):
            assert type(one) is type(other)
            got, want = values(one), values(other)
            wrong.update(name for name in want if got[name] != want[name])
        first = mine[0]
        kinds["decodes"] += first.num_prefills == 0
        kinds["prefills"] += first.num_prefills > 0
        kinds["mixed"] += first.num_prefills > 0 and first.num_decodes > 0
        kinds["continued"] += first.prep_initial_states
        kinds["checkpoints"] += first.checkpoint_meta is not None
        kinds["in one buffer"] += in_one_buffer(first)
        kinds["built by vLLM"] += first.num_prefills > 0 and is_built_by_vllm(case, step)
        if not case.get("drafts"):
            assert shares(mine)
            assert not any(one.state_indices_tensor_d.data_ptr() % 16 for one in mine)
    written = max((mine[0].num_reqs for mine in ours if mine[0].num_prefills == 0), default=0)
    buffers = [[builder.state_indices_tensor_d[:written] for builder in builders] for builders in both]
    same = all(map(torch.equal, *buffers))
    return {"wrong": wrong, "kinds": kinds, "persistent buffers agree": same if case.get("graphs") else None}


def main() -> None:
    model, device = sys.argv[1], torch.device(sys.argv[2])
    found = {}
    for name, case in CASES.items():
        settings = {}
        if case.get("drafts"):
            settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": case["drafts"],
                "prompt_lookup_max": 4,
            }
        config = EngineArgs(
            model=model, skip_tokenizer_init=True, max_model_len=MOST, **settings
        ).create_engine_config()
        with set_current_vllm_config(config), torch.inference_mode():
            found[name] = compare(config, case, device)
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
