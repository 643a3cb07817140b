"""Everything of vLLM that the plugin touches, checked when it is loaded.

A vLLM that lacks one of these, whatever its number, is left alone, and the log says what was missing. A version that
has them all is tried.

What launching decodes by address takes of vLLM besides is not here: without it decodes take vLLM's own way, and the log
says why. It is what `decode_launches.vllm_kernels` imports, with every parameter of both kernels by name; what
`decode_check` and `decodes` import; `num_spec`, `is_blackwell` and `mamba_config` of a layer;
`state_indices_tensor_d`, `num_accepted_tokens` and `query_start_loc_d` of the metadata.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

TESTED_VERSIONS = ("0.32.0", "0.33.0")

_MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"
_METADATA = "vllm.v1.attention.backends.mamba2_attn"
_BACKENDS = "vllm.v1.attention.backends.utils"

# Module, then what is read from it.
MODULE_ATTRIBUTES = {
    _MIXER: ("MambaMixer2", "is_conv_state_dim_first"),
    _METADATA: ("Mamba2AttentionMetadata",),
    "vllm.model_executor.custom_op": ("PluggableLayer", "op_registry_oot"),
    "vllm.forward_context": ("get_forward_context",),
    "vllm.config": ("get_current_vllm_config",),
}

# Module, callable, parameters: those that are passed, by these names or in this order. Others must have defaults.
SIGNATURES = (
    (_MIXER, "MambaMixer2.conv_ssm_forward", ("self", "projected_states", "output")),
    (_MIXER, "MambaMixer2.get_state_dtype", ("self",)),
    (_MIXER, "is_conv_state_dim_first", ()),
    ("vllm.model_executor.custom_op", "PluggableLayer.register_oot", ("_decorated_layer_cls", "name")),
    ("vllm.forward_context", "get_forward_context", ()),
)

# What the builder of metadata needs besides, and only it. Whether it builds all fields is tried in `metadata_check`.
METADATA_MODULE_ATTRIBUTES = {
    _METADATA: ("Mamba2AttentionBackend", "Mamba2AttentionMetadataBuilder"),
    _BACKENDS: ("mamba_get_block_table_tensor",),
    "vllm.v1.attention.backend": ("CommonAttentionMetadata",),
    "vllm.utils.platform_utils": ("is_pin_memory_available",),
}
METADATA_SIGNATURES = (
    (_MIXER, "MambaMixer2.get_attn_backend", ("self",)),
    (_METADATA, "Mamba2AttentionBackend.get_builder_cls", ()),
    (
        _METADATA,
        "Mamba2AttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    (_METADATA, "Mamba2AttentionMetadataBuilder.update_block_table", ("self", "metadata", "blk_table", "slot_mapping")),
    (_METADATA, "Mamba2AttentionMetadataBuilder._update_metadata_for_cudagraph_capture", ("self", "metadata")),
    (_BACKENDS, "mamba_get_block_table_tensor", ("block_table", "seq_lens", "kv_cache_spec", "mamba_cache_mode")),
)

# What capturing whole steps with a prefill needs besides, and only it.
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
GRAPHS_MODULE_ATTRIBUTES = {
    "vllm.config.compilation": (
        "CUDAGraphMode.FULL",
        "CUDAGraphMode.FULL_AND_PIECEWISE",
        "CUDAGraphMode.FULL_DECODE_ONLY",
    ),
    "vllm.v1.attention.backend": ("AttentionCGSupport.ALWAYS",),
    "vllm.v1.worker.gpu.model_runner": ("ModelCudaGraphManager",),
}
GRAPHS_SIGNATURES = (
    (
        _GRAPHS,
        "BatchExecutionDescriptor",
        ("cg_mode", "num_tokens", "num_reqs"),
    ),
    (_GRAPHS, "ModelCudaGraphManager._init_candidates", ("self",)),
    (
        _GRAPHS,
        "ModelCudaGraphManager.dispatch",
        ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
    ),
    (_GRAPHS, "ModelCudaGraphManager.run_fullgraph", ("self", "desc")),
    (
        _METADATA,
        "Mamba2AttentionMetadataBuilder.build_for_cudagraph_capture",
        ("self", "common_attn_metadata"),
    ),
)

# Fields of the metadata that a step plan reads.
METADATA_FIELDS = (
    "num_prefills",
    "num_prefill_tokens",
    "num_decodes",
    "num_decode_tokens",
    "has_initial_states_p",
    "query_start_loc_p",
    "state_indices_tensor_p",
    "cu_chunk_seqlen_p",
    "last_chunk_indices_p",
    "seq_idx_p",
    "chunk_size",
    "nums_dict",
    "checkpoint_chunk_idx",
    "checkpoint_meta",
)

# Attributes of a layer, checked when the first one has been built.
LAYER_ATTRIBUTES = (
    "_ssd_kernels_warmed_up",
    "A",
    "D",
    "activation",
    "cache_config",
    "conv1d",
    "conv_kernel_size",
    "conv_weights",
    "dt_bias",
    "head_dim",
    "kv_cache",
    "model_config",
    "n_groups",
    "num_heads",
    "prefix",
    "ssm_state_size",
    "tp_size",
    "tped_conv_size",
    "tped_dt_size",
    "tped_intermediate_size",
    "use_replayssm",
)


def missing_from_vllm() -> list[str]:
    """Names of what this vLLM lacks, empty if it has everything."""
    missing = _missing(MODULE_ATTRIBUTES, SIGNATURES)
    metadata = _find(_METADATA, "Mamba2AttentionMetadata")
    if metadata is not None:
        fields = {field.name for field in dataclasses.fields(metadata)}
        missing += [f"{_METADATA}.Mamba2AttentionMetadata.{name}" for name in METADATA_FIELDS if name not in fields]
    return missing


def missing_from_metadata() -> list[str]:
    """Names of what the builder of metadata needs and this vLLM lacks."""
    return _missing(METADATA_MODULE_ATTRIBUTES, METADATA_SIGNATURES)


def missing_from_graphs() -> list[str]:
    """Names of what capturing whole steps needs and this vLLM lacks."""
    return _missing(GRAPHS_MODULE_ATTRIBUTES, GRAPHS_SIGNATURES)


def missing_from_layer(layer: object) -> list[str]:
    """Names of the attributes that a built layer lacks."""
    return [f"MambaMixer2().{name}" for name in LAYER_ATTRIBUTES if not hasattr(layer, name)]


def _missing(
    attributes: dict[str, tuple[str, ...]], signatures: tuple[tuple[str, str, tuple[str, ...]], ...]
) -> list[str]:
    missing = []
    for module, names in attributes.items():
        missing += [f"{module}.{name}" for name in names if _find(module, name) is None]
    for module, name, parameters in signatures:
        function = _find(module, name)
        if function is None or not _takes(function, parameters):
            missing.append(f"{module}.{name}({', '.join(parameters)})")
    return missing


def _find(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None) if inspect.isclass(found) else getattr(found, part, None)
        if isinstance(found, classmethod | staticmethod):
            found = _unbound(found)
    return found


def _takes(function: Any, names: tuple[str, ...]) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    may_be_left_out = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(parameter.name for parameter in parameters[: len(names)]) == names and all(
        parameter.default is not parameter.empty or parameter.kind in may_be_left_out
        for parameter in parameters[len(names) :]
    )


def _unbound(method: Any) -> Any:
    """A function without the class that a class method is given."""
    function = method.__func__
    if isinstance(method, staticmethod):
        return function

    def without_class(*_: Any) -> None: ...

    parameters = list(inspect.signature(function).parameters.values())[1:]
    without_class.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return without_class
