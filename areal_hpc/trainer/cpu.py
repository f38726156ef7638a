"""Lets Megatron-core run on CPU with gloo. Called once by `parallel.start` where the device is cpu.

Megatron names the device "cuda" in a few places and asks torch.cuda for the current one.
Here those few places are answered with the CPU; nothing is changed where the device is cuda.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Iterator

import torch

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
_MODULES_NAMING_CUDA = (
    "pipeline_parallel.schedules",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "distributed.param_and_grad_buffer",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "transformer.moe.moe_utils",
    "tensor_parallel.random",
    "utils",
)
"""Modules of megatron.core that write device="cuda" where a trainer of ours passes."""


class _TorchOnCpu(types.ModuleType):
    """Stands for `torch` in one module: factories asked for device "cuda" use the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _on_cpu(factory):
    @functools.wraps(factory)
    def make(*args, **kwargs):
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _NoRngTracker:
    """Megatron's tracker of CUDA generators, where there are none: CPU runs use no dropout."""

    def is_initialized(self) -> bool:
        return False

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        assert not states

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def _splits_as_numpy(tensor, as_numpy=False, record_stream=False):
    """Megatron converts only what it fetches from a GPU; all_to_all takes no tensors as sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _WeightGradients:
    """Apex' extension that adds a weight's gradient to its buffer as part of the matrix product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad) -> None:
        if grad_output.dtype is main_grad.dtype:
            main_grad.addmm_(grad_output.t(), total_input)
        else:
            # 16-bit operands: the sum over tokens is taken in the buffer's fp32, as on GPUs.
            main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


class _NoStream:
    """A CUDA stream on which everything has happened already: the experts' dispatcher asks for one."""

    def wait_stream(self, _other: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self


_CUDA_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def patch_megatron() -> None:
    """Answer Megatron's questions for CUDA with the CPU, in this process. Twice does no harm."""
    if getattr(torch.Tensor.type, "areal_cpu", False):
        return
    plain_type = torch.Tensor.type

    def tensor_type(self, *args, **kwargs):
        # Megatron compares this string to find out a parameter's precision.
        if args or kwargs or self.dtype not in _CUDA_NAMES:
            return plain_type(self, *args, **kwargs)
        return _CUDA_NAMES[self.dtype]

    tensor_type.areal_cpu = True
    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)

    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import token_dispatcher

    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True
    stream = _NoStream()
    torch.cuda.current_stream = lambda *args, **kwargs: stream
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_as_numpy

    random._CUDA_RNG_STATE_TRACKER = _NoRngTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    proxy = _TorchOnCpu()
    for name in _MODULES_NAMING_CUDA:
        importlib.import_module(f"megatron.core.{name}").torch = proxy
