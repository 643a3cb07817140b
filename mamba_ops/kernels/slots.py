"""How a kernel reads the number of a cache slot."""

import triton
import triton.language as tl


@triton.jit
def load_slot(slots_ptr, stride_slots, pid_b, num_slots):
    """Slot of sequence pid_b as a 64-bit number; a negative one counts from the end, as in torch indexing."""
    slot = tl.load(slots_ptr + pid_b * stride_slots).to(tl.int64)
    return tl.where(slot < 0, slot + num_slots, slot)
