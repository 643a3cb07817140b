"""The vLLM plugin: Mamba2 layers of an unmodified server whose prefill runs without the state snapshot.

vLLM calls `register` in every process that it starts (entry point group `vllm.general_plugins`). Only modules of this
package import vLLM, and only once `register` has been called.
"""

from inductor_passes.vllm.plugin import register

__all__ = ["register"]
