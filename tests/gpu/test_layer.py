"""The layer and its convolution on a GPU: the results of the CPU, both spellings of the state with the same bits."""

import pytest
import torch

from mamba_ops.conv import causal_conv
from tests.mamba_ops.test_conv import make_case, view_of_pages
from tests.mamba_ops.test_layer import batch, clone, make_layer, make_state

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_equals_that_of_the_cpu(dtype: torch.dtype, compiled: bool) -> None:
    case = make_case([5, 1, 0, 9], dtype=dtype, mask=[True, False, True, True], slot_padding=64, padding_tokens=2)
    pages = case.pages.cuda()
    conv_state = view_of_pages(pages, case.conv_state.shape[1:])
    slots = (case.read_slots.cuda(), case.has.cuda(), case.write_slots.cuda())
    inputs = (case.x.cuda(), case.weight.cuda(), case.bias.cuda(), case.cu_seqlens.cuda())
    out = (torch.compile(causal_conv, fullgraph=True) if compiled else causal_conv)(*inputs, conv_state, *slots)
    expected = case.run()
    ntokens = int(case.cu_seqlens[-1])
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out[:ntokens].cpu(), expected[:ntokens], rtol=rounding, atol=1e-5)
    assert torch.equal(pages.cpu().view(torch.uint8), case.pages.view(torch.uint8))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_spellings_of_the_state_give_the_same_bits(dtype: torch.dtype, compiled: bool) -> None:
    layers = [make_layer(dtype, snapshot=snapshot).cuda() for snapshot in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    hidden_states, metadata = batch([40, 3, 17], dtype)
    metadata = metadata._replace(**{name: t.cuda() for name, t in metadata._asdict().items() if name != "chunk_size"})
    slots, has = torch.tensor([4, 10, 0]).cuda(), torch.tensor([True, False, True]).cuda()
    state = make_state(layers[0], [4, 0])
    results = []
    for layer, own in zip(layers, (state, clone(state)), strict=True):
        forward = torch.compile(layer, fullgraph=True) if compiled else layer
        results.append((forward(hidden_states.cuda(), metadata, *own, slots, has, slots), own))
    (out, own), (expected, other) = results
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(tuple(own), tuple(other), rtol=0, atol=0, equal_nan=True)
    assert out.isfinite().all()
