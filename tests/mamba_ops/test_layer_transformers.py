"""`Mamba2Layer` with the weights of transformers' mixers against those mixers, as their authors wrote them."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mamba_ops.layer import LayerState, Mamba2Layer
from mamba_ops.metadata import build_chunk_metadata
from mamba_ops.weights import layer_from_transformers
from tests.mamba_ops.mixers import FAMILIES, HIDDEN, make_mixer

families = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = [1, 16, 37, 50]


def prefill(
    layer: Mamba2Layer, pieces: list[Tensor], state: LayerState, slots: list[int], has: list[bool]
) -> list[Tensor]:
    """Continue one sequence in each slot by one piece."""
    lengths = [piece.shape[0] for piece in pieces]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    metadata = build_chunk_metadata(offsets, layer.chunk_size)
    index, mask = torch.tensor(slots, dtype=torch.int32), torch.tensor(has)
    out = layer(torch.cat(pieces), metadata, *state, index, mask, index)
    return list(out.split(lengths))


def poisoned_state(layer: Mamba2Layer, num_slots: int, state_dtype: torch.dtype | None = None) -> LayerState:
    state = layer.allocate_state(num_slots, state_dtype, slot_padding=3)
    for cache in state:
        cache.fill_(torch.nan)
    return state


def assert_close_fp32(got: Tensor, expected: Tensor) -> None:
    # FP32 throughout, in sums of at most some hundred terms: 1e-5 of the largest value is about 80 roundings.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@families
def test_whole_prompts(family: str) -> None:
    mixer = make_mixer(family)
    layer = layer_from_transformers(mixer.module, mixer.config)
    prompts = [torch.randn(length, HIDDEN) for length in LENGTHS]
    outs = prefill(layer, prompts, poisoned_state(layer, 5), [3, 0, 4, 1], [False] * 4)
    for out, prompt in zip(outs, prompts, strict=True):
        assert_close_fp32(out, mixer.forward(prompt))


@families
def test_pieces_continued_from_the_slots(family: str) -> None:
    mixer = make_mixer(family)
    layer = layer_from_transformers(mixer.module, mixer.config, snapshot=family == "mamba2")
    prompts = [torch.randn(length, HIDDEN) for length in (50, 41)]
    state = poisoned_state(layer, 4)
    pieces: list[list[Tensor]] = [[], []]
    # Cut at a chunk's end, around it, inside the history of the convolution, and where one sequence pauses.
    for (a, b), (c, d) in zip(pairwise([0, 16, 17, 33, 50]), pairwise([0, 1, 3, 3, 41]), strict=True):
        new = prefill(layer, [prompts[0][a:b], prompts[1][c:d]], state, [2, 0], [a > 0, c > 0])
        for taken, piece in zip(pieces, new, strict=True):
            taken.append(piece)
    for taken, prompt in zip(pieces, prompts, strict=True):
        assert_close_fp32(torch.cat(taken), mixer.forward(prompt))


@families
def test_a_batch_equals_its_sequences_one_by_one(family: str) -> None:
    mixer = make_mixer(family)
    layer = layer_from_transformers(mixer.module, mixer.config)
    prompts = [torch.randn(length, HIDDEN) for length in LENGTHS]
    together, alone = poisoned_state(layer, 4), poisoned_state(layer, 4)
    outs = prefill(layer, prompts, together, [0, 1, 2, 3], [False] * 4)
    for slot, (out, prompt) in enumerate(zip(outs, prompts, strict=True)):
        assert_close_fp32(out, prefill(layer, [prompt], alone, [slot], [False])[0])
    torch.testing.assert_close(together.conv_state, alone.conv_state, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.state_cache, alone.state_cache, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mamba2", "bamba", "granitemoehybrid"])
def test_half_precision_is_no_less_accurate(family: str, dtype: torch.dtype) -> None:
    mixer = make_mixer(family)
    mixer.module.to(dtype)
    exact = mixer._replace(module=copy.deepcopy(mixer.module).float())
    layer = layer_from_transformers(mixer.module, mixer.config)
    prompt = torch.randn(200, HIDDEN, dtype=dtype)
    expected = exact.forward(prompt.float())
    (out,) = prefill(layer, [prompt], poisoned_state(layer, 1), [0], [False])

    def error(values: Tensor) -> float:
        return (values.float() - expected).square().mean().sqrt().item()

    assert out.dtype == dtype
    # Both round the same quantities, in places not quite the same: the root mean squares come out within some 10 %.
    assert error(out) <= 1.25 * error(mixer.forward(prompt))


@pytest.mark.parametrize("family", ["mamba2", "granitemoehybrid", "falcon_h1"])
def test_compiled_without_a_graph_break(family: str) -> None:
    mixer = make_mixer(family)
    layer = layer_from_transformers(mixer.module, mixer.config)
    compiled = torch.compile(layer, fullgraph=True)
    prompts = [torch.randn(length, HIDDEN) for length in (50, 37)]
    state = poisoned_state(layer, 4)
    first = prefill(compiled, [p[:20] for p in prompts], state, [2, 0], [False, False])
    second = prefill(compiled, [p[20:] for p in prompts], state, [2, 0], [True, True])
    for *outs, prompt in zip(first, second, prompts, strict=True):
        assert_close_fp32(torch.cat(outs), mixer.forward(prompt))
