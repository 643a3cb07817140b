"""A Mamba2 layer that continues sequences from cached states: in_proj, convolution, SSD, gated norm, out_proj.

It holds no state of its own. The two caches are arguments, indexed by slot, so that one cache serves a ragged batch of
any sequences, and `torch.compile(fullgraph=True)` sees every read and write of them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba_ops.conv import causal_conv_unchecked
from mamba_ops.layer_checks import check_call
from mamba_ops.metadata import ChunkMetadata
from mamba_ops.norm import gated_rms_norm
from mamba_ops.ops.checked_offsets import checked_offsets
from mamba_ops.ssd import ssd_chunk_scan
from mamba_ops.value_checks import checks_enabled


class LayerState(NamedTuple):
    """The caches of one layer, a slot for each sequence.

    `conv_state` (num_slots, conv_dim, conv_width - 1), `state_cache` (num_slots, nheads, headdim, dstate).
    """

    conv_state: Tensor
    state_cache: Tensor


class Mamba2Layer(nn.Module):
    """Mamba2 (Dao and Gu, "Transformers are SSMs", 2024) for inference on a ragged batch; parameters need no gradient.

    Args:
        hidden_size: channels of the model.
        nheads, headdim: heads of the SSD and channels of each; d_inner = nheads * headdim.
        dstate: state size. ngroups: groups of heads that share B and C; it divides nheads.
        conv_width: taps of the causal convolution, at least 2.
        in_proj_bias, conv_bias, out_proj_bias: which of them have a bias.
        rms_norm: gated RMS norm over ngroups groups after the SSD; without it SiLU(z) multiplies the SSD's result.
        norm_before_gate, norm_eps: see `gated_rms_norm`.
        dt_limit: range to which dt is clamped after softplus.
        in_multiplier: factor on the input; proj_multipliers: factors on the z, x, B, C and dt parts of the projection
            (the maximal update parametrisation of Falcon-H1).
        chunk_size: what the model was made with, for `build_chunk_metadata`; any other gives the same result.
        snapshot: spell the state as stock code does: a gathered and masked copy of the entering states, then the scan.
            False reads the states in place. The results are the same bit for bit.
        device, dtype: of the projections, the convolution and the norm. A_log, D and dt_bias are created in FP32.

    Raises:
        ValueError: sizes that do not fit together.
    """

    proj_scale: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        nheads: int,
        headdim: int,
        dstate: int,
        *,
        ngroups: int = 1,
        conv_width: int = 4,
        in_proj_bias: bool = False,
        conv_bias: bool = True,
        out_proj_bias: bool = False,
        rms_norm: bool = True,
        norm_before_gate: bool = False,
        norm_eps: float = 1e-5,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        in_multiplier: float = 1.0,
        proj_multipliers: tuple[float, float, float, float, float] | None = None,
        chunk_size: int = 256,
        snapshot: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if ngroups < 1 or nheads % ngroups:
            raise ValueError(f"ngroups must divide nheads, got ngroups={ngroups}, nheads={nheads}")
        if conv_width < 2:
            raise ValueError(f"conv_width must be at least 2, got {conv_width}")
        if not dt_limit[0] <= dt_limit[1]:
            raise ValueError(f"dt_limit: {dt_limit}; the lower limit must not exceed the upper one")
        self.hidden_size, self.nheads, self.headdim, self.dstate, self.ngroups = (
            hidden_size,
            nheads,
            headdim,
            dstate,
            ngroups,
        )
        self.conv_width, self.chunk_size, self.snapshot = conv_width, chunk_size, snapshot
        self.norm_before_gate, self.norm_eps, self.dt_limit = norm_before_gate, norm_eps, dt_limit
        self.in_multiplier = in_multiplier
        self.d_inner, self.bc_dim = nheads * headdim, ngroups * dstate
        self.conv_dim = self.d_inner + 2 * self.bc_dim

        parts = (self.d_inner, self.d_inner, self.bc_dim, self.bc_dim, nheads)
        self.in_proj = nn.Linear(hidden_size, sum(parts), bias=in_proj_bias, device=device, dtype=dtype)
        self.conv_weight = nn.Parameter(torch.empty(self.conv_dim, conv_width, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(self.conv_dim, device=device, dtype=dtype)) if conv_bias else None
        self.A_log = nn.Parameter(torch.empty(nheads, device=device, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(nheads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(nheads, device=device, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(self.d_inner, device=device, dtype=dtype)) if rms_norm else None
        self.out_proj = nn.Linear(self.d_inner, hidden_size, bias=out_proj_bias, device=device, dtype=dtype)
        scale = None
        if proj_multipliers is not None:
            scale = torch.tensor(proj_multipliers, device=device).repeat_interleave(torch.tensor(parts, device=device))
        self.register_buffer("proj_scale", scale, persistent=False)
        self.reset_parameters()
        self.requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights as Mamba2 does: A in 1..nheads, dt log-uniform in [0.001, 0.1], D and the norm one."""
        self.A_log.copy_(torch.arange(1, self.nheads + 1, dtype=torch.float32).log())
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        self.D.fill_(1.0)
        nn.init.kaiming_uniform_(self.conv_weight, a=math.sqrt(5))
        if self.conv_bias is not None:
            self.conv_bias.zero_()
        if self.norm_weight is not None:
            self.norm_weight.fill_(1.0)

    def allocate_state(
        self,
        num_slots: int,
        state_dtype: torch.dtype | None = None,
        *,
        slot_padding: int = 0,
        device: torch.device | str | None = None,
    ) -> LayerState:
        """Zeroed caches of num_slots slots.

        Args:
            state_dtype: of `state_cache`, the dtype of the weights if None; `conv_state` has the dtype of the weights.
            slot_padding: unused elements after each slot's row, as where attention and state pages share one size.
            device: where, if not beside the weights.
        """
        weight = self.conv_weight
        shapes = (self.conv_dim, self.conv_width - 1), (self.nheads, self.headdim, self.dstate)
        caches = []
        for shape, dtype in zip(shapes, (weight.dtype, state_dtype or weight.dtype), strict=True):
            row = math.prod(shape)
            pages = torch.zeros(num_slots, row + slot_padding, dtype=dtype, device=device or weight.device)
            caches.append(pages[:, :row].unflatten(1, shape))
        return LayerState(*caches)

    def forward(
        self,
        hidden_states: Tensor,
        metadata: ChunkMetadata,
        conv_state: Tensor,
        state_cache: Tensor,
        read_slots: Tensor,
        has_initial_state: Tensor | None,
        write_slots: Tensor,
    ) -> Tensor:
        """Continue every sequence from its read slot and leave its new state in its write slot.

        Args:
            hidden_states: (ntokens, hidden_size), the sequences one after the other.
            metadata: how the tokens are split into sequences and chunks, from `build_chunk_metadata`.
            conv_state, state_cache: the caches, see `allocate_state`; updated in place.
            read_slots, write_slots: (nseqs,) int32 or int64, any stride; a negative slot counts from the end. Pass the
                same tensor twice where each sequence keeps its slot.
            has_initial_state: (nseqs,) bool, False for a sequence that starts from zeros; None means all continue.

        Returns:
            (ntokens, hidden_size), dtype of hidden_states.

        Raises:
            ValueError, TypeError: an argument of the wrong shape, dtype or device, a slot out of range or written
                twice; nothing has been written then.
        """
        check_call(self, hidden_states, metadata, conv_state, state_cache, read_slots, has_initial_state, write_slots)
        if checks_enabled(conv_state.device):
            # The scan checks all this itself, but after the convolution has written.
            cu_seqlens, cu_chunk_seqlens = checked_offsets(
                metadata.cu_seqlens,
                metadata.cu_chunk_seqlens,
                metadata.last_chunk_indices,
                metadata.seq_idx,
                hidden_states.shape[0],
                metadata.chunk_size,
                conv_state.shape[0],
                read_slots,
                has_initial_state,
                write_slots,
                crossed=self.snapshot,
            )
            metadata = metadata._replace(cu_seqlens=cu_seqlens, cu_chunk_seqlens=cu_chunk_seqlens)
        projected = self.in_proj(hidden_states if self.in_multiplier == 1.0 else hidden_states * self.in_multiplier)
        if self.proj_scale is not None:
            projected = (projected * self.proj_scale).to(projected.dtype)
        z, inputs, dt = projected.split((self.d_inner, self.conv_dim, self.nheads), dim=-1)
        inputs = causal_conv_unchecked(
            inputs,
            self.conv_weight,
            self.conv_bias,
            metadata.cu_seqlens,
            conv_state,
            read_slots,
            has_initial_state,
            write_slots,
        )
        y = self._scan(inputs, z, dt, metadata, state_cache, read_slots, has_initial_state, write_slots)
        if self.norm_weight is not None:
            y = gated_rms_norm(y, z, self.norm_weight, self.ngroups, self.norm_eps, self.norm_before_gate)
        out: Tensor = self.out_proj(y)
        return out

    def _scan(
        self,
        inputs: Tensor,
        z: Tensor,
        dt: Tensor,
        metadata: ChunkMetadata,
        state_cache: Tensor,
        read_slots: Tensor,
        has_initial_state: Tensor | None,
        write_slots: Tensor,
    ) -> Tensor:
        x, B, C = inputs.split((self.d_inner, self.bc_dim, self.bc_dim), dim=-1)
        heads, groups = (self.nheads, self.headdim), (self.ngroups, self.dstate)
        initial_states = None
        if self.snapshot:
            initial_states = state_cache[read_slots]
            if has_initial_state is not None:
                initial_states = torch.where(has_initial_state[:, None, None, None], initial_states, 0)
        result = ssd_chunk_scan(
            x.unflatten(-1, heads),
            dt,
            -torch.exp(self.A_log.float()),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
            metadata,
            D=self.D,
            z=z.unflatten(-1, heads) if self.norm_weight is None else None,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            initial_states=initial_states,
            state_cache=state_cache,
            read_slots=None if self.snapshot else read_slots,
            has_initial_state=None if self.snapshot else has_initial_state,
            write_slots=write_slots,
        )
        return result.out.flatten(-2)
