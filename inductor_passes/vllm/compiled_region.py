"""The region compiled once for a shape of layer, and called without guards.

`torch.compile` would evaluate guards in front of every call, and PyTorch's runtime wrappers would look at every
argument again. Here the region is traced with symbols for all that varies, lowered by Inductor, and the function that
Inductor generated is called directly: nothing stands between the layer and the launches. What guards would check is
checked once a layer and once a step instead (`inductor_passes.vllm.layer_tensors`, `inductor_passes.vllm.step`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import GraphReport, inductor_options
from inductor_passes.inspection.recorded import Recording, merged
from inductor_passes.inspection.recording import recorded
from inductor_passes.vllm import region as spelled
from inductor_passes.vllm.example_inputs import Example, Sizes, example_inputs
from inductor_passes.vllm.region import keep_inputs, prefill, prefill_in_one_pass, prefill_with_checkpoints
from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors, StepTensors
from mamba_ops import ssd_chunk_scan

logger = logging.getLogger("inductor_passes.vllm")


@dataclasses.dataclass(frozen=True)
class CompiledRegion:
    """A compiled prefill.

    Attributes:
        shape: of the layers that may use it.
        checkpoints: whether it is `prefill_with_checkpoints`.
        max_tokens: of a sequence, if it is `prefill_in_one_pass`; otherwise None.
        one_chunk: whether each sequence must be one chunk.
        run: takes a list of `Sizes` and tensors, in the order of `arguments`, which it empties.
        recording: the graph that the pass got and the one that it left, and what Inductor generated.
        direct: the same with addresses in place of tensors, if it is a `DirectRegion`.
    """

    shape: LayerShape
    checkpoints: bool
    max_tokens: int | None
    one_chunk: bool
    run: Callable[[list[Any]], Any]
    recording: Recording
    direct: Callable[..., None] | None = None

    @property
    def report(self) -> GraphReport:
        """What the pass did."""
        return self.recording.changes[-1].report if self.recording.changes else GraphReport()

    def __call__(
        self, sizes: Iterable[int], projected: Tensor, out: Tensor, layer: Iterable[Any], step: Iterable[Any]
    ) -> None:
        """Run it; see `inductor_passes.vllm.region`. `layer` without what is None, `step` with checkpoints last."""
        self.run([*sizes, projected, out, *layer, *step])


def compile_region(shape: LayerShape, *, eliminate: bool = True) -> CompiledRegion:
    """Trace and compile the prefill for layers of one shape.

    Args:
        shape: of the layers.
        eliminate: whether the pass runs. Without it the snapshot stays, for comparisons.

    Raises:
        Exception: whatever PyTorch raises when it cannot compile; nothing has been changed then.
    """

    def function(projected: Tensor, out: Tensor, layer: LayerTensors, step: StepTensors, _: Any) -> None:
        prefill(projected, out, layer, step, shape)

    return _compile(function, shape, eliminate=eliminate)


def compile_region_in_one_pass(shape: LayerShape, max_tokens: int, one_chunk: bool) -> CompiledRegion:
    """The same for `prefill_in_one_pass`, which has no snapshot to begin with."""

    def function(projected: Tensor, out: Tensor, layer: LayerTensors, step: StepTensors, _: Any) -> None:
        prefill_in_one_pass(projected, out, layer, step, shape, max_tokens, one_chunk)

    compiled = _compile(function, shape, eliminate=False)
    return dataclasses.replace(compiled, max_tokens=max_tokens, one_chunk=one_chunk)


def compile_region_with_checkpoints(shape: LayerShape, *, eliminate: bool = True) -> CompiledRegion:
    """The same for `keep_inputs` and `prefill_with_checkpoints`, one after the other.

    The snapshot stays there, in one launch. On a CPU they are not compiled: a C++ compiler would take half a minute
    over index arithmetic that takes microseconds.
    """

    def first(projected: Tensor, _: Tensor, layer: LayerTensors, step: StepTensors, kept: CheckpointTensors) -> None:
        keep_inputs(projected, layer, step, kept, shape)

    def second(projected: Tensor, out: Tensor, layer: LayerTensors, step: StepTensors, kept: CheckpointTensors) -> None:
        prefill_with_checkpoints(projected, out, layer, step, kept, shape)

    if shape.device.type == "cpu":
        flat = [_over_flat(function, shape) for function in (first, second)]

        def run(arguments: list[Any]) -> None:
            for function in flat:
                function(*arguments)

        uncompiled = Recording(problems=["prefill with checkpoints runs uncompiled"])
        return CompiledRegion(shape, True, None, False, run, uncompiled)
    inputs, states = (_compile(function, shape, checkpoints=True, eliminate=eliminate) for function in (first, second))

    def run_both(arguments: list[Any]) -> None:
        inputs.run(arguments.copy())
        states.run(arguments)

    return dataclasses.replace(states, run=run_both, recording=merged([inputs.recording, states.recording]))


def _compile(
    function: Callable[..., None],
    shape: LayerShape,
    *,
    checkpoints: bool = False,
    eliminate: bool,
) -> CompiledRegion:
    # vLLM runs models in inference mode, whose tensors cannot be traced; it may also have set a default device.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        example = example_inputs(shape)
        flat: list[Any] = [*example.sizes, example.projected, example.out, *present(example.layer), *example.step]
        if checkpoints:
            flat += example.checkpoints
        _keep_source_lines()
        with example.mode:
            traced = make_fx(_over_flat(function, shape), record_stack_traces=True)(*flat)
        recording = Recording()
        outputs: list[Any] = []

        def keep_output(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            # Whatever the process has chosen: PyTorch 2.14 cannot build C++ that launches our kernels. Not among the
            # options of `compile_fx`, which drops symbols from its inputs when it sees that one.
            options["cpp_wrapper"] = False
            with V.set_real_inputs(inputs):
                outputs.append(compile_fx_inner(graph, inputs, **options))
            return outputs[-1]

        options = {
            **(inductor_options() if eliminate else {}),
            # A graph from a cache would not pass through the pass, and there is one graph a process.
            "force_disable_caches": True,
            "size_asserts": False,
            "alignment_asserts": False,
            "triton.cudagraphs": False,
        }
        title = f"Prefill of {shape.nheads} heads x {shape.headdim} x {shape.dstate}"
        watching = recorded(recording, title=title, inputs=_names(shape, checkpoints))
        with watching, tracing(TracingContext(example.mode)), _on(shape.device):
            compile_fx(traced, flat, inner_compile=keep_output, config_patches=options)
    (output,) = outputs
    _check_symbols(example)
    return CompiledRegion(shape, checkpoints, None, False, output.current_callable, recording)


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """The tensors that are there: a compiled function has no argument for the others."""
    return [tensor for tensor in tensors if tensor is not None]


def _keep_source_lines() -> None:
    """Let nodes know which line of the region they come from: `make_fx` keeps lines of methods `forward` by itself."""
    register = getattr(fx.proxy, "_register_stack_trace_anchor", None)
    if register is not None:
        for function in (*vars(spelled).values(), ssd_chunk_scan):
            register(function)


def _names(shape: LayerShape, checkpoints: bool) -> list[str]:
    """What the inputs of the traced function are called, in their order."""
    layer = [name for name in LayerTensors._fields if shape.has_conv_bias or name != "conv_bias"]
    last = CheckpointTensors._fields if checkpoints else ()
    return [*Sizes._fields, "projected", "out", *layer, *StepTensors._fields, *last]


def _over_flat(function: Callable[..., None], shape: LayerShape) -> Callable[..., tuple[()]]:
    nsizes, nstep = len(Sizes._fields), len(StepTensors._fields)
    nlayer = len(LayerTensors._fields) - (not shape.has_conv_bias)

    def flat(*arguments: Any) -> tuple[()]:
        projected, out, *rest = arguments[nsizes:]
        layer = rest[:nlayer]
        if not shape.has_conv_bias:
            layer.insert(LayerTensors._fields.index("conv_bias"), None)
        kept = rest[nlayer + nstep :]
        step = StepTensors(*rest[nlayer : nlayer + nstep])
        function(projected, out, LayerTensors(*layer), step, CheckpointTensors(*kept) if kept else None)
        return ()

    return flat


def _check_symbols(example: Example) -> None:
    """Raise if tracing has fixed a size that varies while serving, or tied two of them together."""
    env: Any = example.mode.shape_env
    for name, size in example.sizes._asdict().items():
        symbol = size.node._expr
        if not symbol.is_Symbol or symbol in env.replacements:
            raise RuntimeError(f"tracing has fixed {name}: {symbol} = {env.replacements.get(symbol)}")
    for guard in env.guards:
        if guard.expr.func.__name__ == "Equality":
            raise RuntimeError(f"tracing has made the code depend on {guard.expr}")


def _on(device: torch.device) -> Any:
    return torch.accelerator.device_index(device.index) if device.type != "cpu" else torch.device("cpu")
