"""Each op on a CPU against what it should compute, in FP64 and written for one chunk and head at a time."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mamba_ops import ops
from tests.mamba_ops.batches import DTYPES, Batch, Shape, assert_near, assert_same, make_batch, make_cache

SHAPE = Shape(nheads=4, headdim=24, dstate=40, ngroups=2, chunk_size=32)
LENGTHS = [70, 0, 1, 32, 100]


def padded(batch: Batch) -> Tensor:
    """Chunk offsets with two empty chunks at the end, as in metadata padded to a fixed size."""
    cu = batch.metadata.cu_chunk_seqlens
    return torch.cat([cu, cu[-1:], cu[-1:]])


def random_steps(nchunks: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """dt_out and dA_cumsum of full chunks."""
    dt = torch.rand(nchunks, shape.nheads, shape.chunk_size) * 0.2
    return dt, -(dt * torch.rand(shape.nheads, 1)).cumsum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dt_min", "dt_max"), [(None, None), (0.0, None), (0.02, 0.1), (None, 0.05)])
@pytest.mark.parametrize("activated", [True, False])
def test_chunk_cumsum(dtype: torch.dtype, dt_min: float | None, dt_max: float | None, activated: bool) -> None:
    batch = make_batch(LENGTHS, SHAPE, dtype, strided=True)
    A, bias = batch.inputs["A"], batch.options["dt_bias"] if activated else None
    dt = batch.inputs["dt"] if activated else batch.inputs["dt"].abs()
    cu = padded(batch)
    dA_cumsum, dt_out = ops.chunk_cumsum(dt, A, cu, 32, bias, activated, dt_min, dt_max)
    assert dA_cumsum.shape == dt_out.shape == (cu.shape[0] - 1, 4, 32)

    step = softplus(dt.double() + bias.double()) if activated else dt.double()
    step = step.clamp(dt_min, dt_max) if (dt_min, dt_max) != (None, None) else step
    for c, (start, end) in enumerate(pairwise(cu.tolist())):
        size = end - start
        assert_near(dt_out[c, :, :size], step[start:end].T)
        assert_near(dA_cumsum[c, :, :size], (step[start:end].T * A[:, None].double()).cumsum(-1))
        assert_same(dt_out[c, :, size:], torch.zeros(4, 32 - size))
        if size:
            assert_same(dA_cumsum[c, :, size:], dA_cumsum[c, :, size - 1 : size].expand(4, 32 - size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_state(dtype: torch.dtype) -> None:
    batch = make_batch(LENGTHS, SHAPE, dtype, strided=True)
    cu, x, B = padded(batch), batch.inputs["x"], batch.inputs["B"]
    dt, dA = random_steps(cu.shape[0] - 1, SHAPE)
    states = ops.chunk_state(B, x, dt, dA, cu)
    for c, (start, end) in enumerate(pairwise(cu.tolist())):
        for h in range(4):
            weight = (dA[c, h, -1] - dA[c, h, : end - start]).double().exp() * dt[c, h, : end - start]
            expected = (weight[:, None] * x[start:end, h].double()).T @ B[start:end, h // 2].double()
            assert_near(states[c, h], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bmm_chunk(dtype: torch.dtype) -> None:
    batch = make_batch(LENGTHS, SHAPE, dtype, strided=True)
    cu, B, C = padded(batch), batch.inputs["B"], batch.inputs["C"]
    cb = ops.bmm_chunk(C, B, cu, 32)
    for c, (start, end) in enumerate(pairwise(cu.tolist())):
        size = end - start
        expected = torch.einsum("mgn,kgn->gmk", C[start:end].double(), B[start:end].double())
        assert_near(cb[c, :, :size, :size].tril(), expected.tril())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("skip", [None, 1, 2])
def test_chunk_scan(dtype: torch.dtype, gate: bool, skip: int | None) -> None:
    batch = make_batch(LENGTHS, SHAPE, dtype, gate=gate, skip=skip, strided=True)
    cu, x, C = padded(batch), batch.inputs["x"], batch.inputs["C"]
    D, z = batch.options.get("D"), batch.options.get("z")
    nchunks = cu.shape[0] - 1
    dt, dA = random_steps(nchunks, SHAPE)
    entering = torch.randn(nchunks, *SHAPE.row).to(dtype)
    cb = torch.randn(nchunks, 2, 32, 32)
    # What the product stage leaves undefined must not matter.
    defined = torch.ones(32, 32).tril().bool()
    out = torch.full((x.shape[0] + 5, 4, 30), torch.nan, dtype=dtype)
    view = out[:-5, :, 3:27]
    ops.chunk_scan(cb.where(defined, torch.nan), x, dt, dA, C, entering, cu, view, D, z)

    expected = torch.zeros(x.shape, dtype=torch.float64)
    for c, (start, end) in enumerate(pairwise(cu.tolist())):
        size = end - start
        for h in range(4):
            total = dA[c, h, :size].double()
            scores = (total[:, None] - total).exp().tril() * cb[c, h // 2, :size, :size].double()
            y = scores @ (dt[c, h, :size, None] * x[start:end, h].double())
            y += total.exp()[:, None] * (C[start:end, h // 2].double() @ entering[c, h].double().T)
            expected[start:end, h] = y
    if D is not None:
        expected += x.double() * (D if skip == 2 else D[:, None]).double()
    if z is not None:
        expected *= silu(z.double())
    assert_near(view, expected, dtype)
    view.zero_()
    assert int(out.isnan().sum()) == out.numel() - view.numel(), "something beside the output was written"


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("initial_dtype", [None, *DTYPES])
def test_state_passing(state_dtype: torch.dtype, initial_dtype: torch.dtype | None) -> None:
    batch = make_batch(LENGTHS, SHAPE)
    last = batch.metadata.last_chunk_indices
    nchunks = int(last[-1]) + 1
    states = torch.randn(nchunks, *SHAPE.row)
    dA = random_steps(nchunks, SHAPE)[1]
    initial = None
    if initial_dtype is not None:
        initial = make_cache(5, SHAPE, initial_dtype, padding=40).view
    entering, final = ops.state_passing(states, dA, last, initial, state_dtype)
    assert entering.dtype == final.dtype == state_dtype

    first = 0
    for b, end in enumerate((last + 1).tolist()):
        state = torch.zeros(SHAPE.row, dtype=torch.float64) if initial is None else initial[b].double()
        for c in range(first, end):
            assert_near(entering[c], state, state_dtype)
            state = dA[c, :, -1].double().exp()[:, None, None] * state + states[c].double()
        assert_near(final[b], state, state_dtype)
        first = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [True, False])
def test_masked_gather_is_index_then_where(dtype: torch.dtype, index_dtype: torch.dtype, masked: bool) -> None:
    cache = make_cache(6, SHAPE, dtype, padding=8, offset=5, live=[0, 3, 5])
    slots = torch.tensor([3, -1, 0, 3, 1], dtype=index_dtype)
    has = torch.tensor([True, True, False, True, False])
    if not masked:
        slots, has = slots[:-1], None
    rows = ops.masked_gather(cache.view, slots, has)
    expected = cache.view[slots.long()]
    assert_same(rows, expected if has is None else torch.where(has[:, None, None, None], expected, 0))
    assert rows.is_contiguous()


def test_write_empty_stores_the_initial_state_of_empty_sequences() -> None:
    last = torch.tensor([-1, 0, 0], dtype=torch.int32)
    states, dA = torch.randn(1, *SHAPE.row), random_steps(1, SHAPE)[1]
    before = make_cache(6, SHAPE, live=[1, 2, 3])
    read, write = torch.tensor([1, 2, 0]), torch.tensor([4, 2, 5])
    has = torch.tensor([True, True, False])
    for write_empty in (True, False):
        after = before.clone()
        ops.state_passing_indexed(states, dA, last, after.view, read, has, write, write_empty)
        after.check_only_written(before, [2, 4, 5] if write_empty else [2])
        if write_empty:
            assert_same(after.view[4], before.view[1])
            assert_same(after.view[5], torch.zeros(SHAPE.row))
