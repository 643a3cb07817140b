"""The checks on the values of slots as an op, for code that Inductor compiles and that cannot look at values itself."""

import torch
from torch import Tensor
from torch.library import custom_op

from mamba_ops.value_checks import check_indexed_slots, resolve_slots


@custom_op("mamba_ops::checked_slots", mutates_args=())
def checked_slots(
    cu_seqlens: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    ntokens: int,
    num_slots: int,
) -> tuple[Tensor, Tensor]:
    """The slots, counted from the front, once they and the offsets have passed the checks.

    What uses the results instead of the arguments comes after the checks, in a compiled graph as well.

    Args:
        cu_seqlens: (nseqs + 1,) int32 or int64, token offsets; the slots of an empty sequence are not checked.
        read_slots, write_slots: (nseqs,) int32 or int64, any stride.
        has_initial_state: (nseqs,) bool, None for all of them; the others' read slots are not checked.
        ntokens: tokens of the batch. num_slots: slots of the cache.

    Returns:
        read_slots and write_slots, (nseqs,) int64 dense.

    Raises:
        ValueError: offsets that decrease or do not fit the tokens, a slot out of range, or two equal write slots.
    """
    offsets = cu_seqlens.cpu()
    lengths = offsets.diff()
    if offsets[0] != 0 or offsets[-1] > ntokens or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens: must start at 0, never decrease and end at most at {ntokens}, the number of tokens; "
            f"got {offsets.tolist()}"
        )
    written = (lengths > 0).to(write_slots.device)
    read = written if has_initial_state is None else written & has_initial_state
    check_indexed_slots(read_slots, read, write_slots, written, num_slots)
    return resolve_slots(read_slots, num_slots), resolve_slots(write_slots, num_slots)


@checked_slots.register_fake
def _(
    cu_seqlens: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    ntokens: int,
    num_slots: int,
) -> tuple[Tensor, Tensor]:
    return (
        read_slots.new_empty(read_slots.shape, dtype=torch.int64),
        write_slots.new_empty(write_slots.shape, dtype=torch.int64),
    )
