"""The snapshot on the CPU: rows of the state cache, zeros where a sequence has no initial state."""

from torch import Tensor

from mamba_ops.value_checks import check_slots, resolve_slots


def masked_gather(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """The op `mamba_ops::masked_gather`; shapes are described there."""
    read = slots.new_ones(slots.shape).bool() if has_initial_state is None else has_initial_state
    check_slots("slots", slots, state_cache.shape[0], read)
    rows = state_cache.new_zeros((slots.shape[0], *state_cache.shape[1:]))
    rows[read] = state_cache[resolve_slots(slots[read], state_cache.shape[0])]
    return rows
