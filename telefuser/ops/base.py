"""How an operator chooses its implementation: `CustomOp` for modules, `CustomOpFunction` for functions, one rule.

The rule, in order: (1) under `torch.compile` the native implementation, which the compiler fuses with its neighbours,
or the operator's registered opaque form; (2) native, where a kernel cannot stand in for it: a tensor on another
device than the platform's or than its fellows, a result that needs a gradient, a tensor subclass, a dtype the kernels
do not compute in; (3) the first of the platform's `op_keys` that the operator defines; (4) native.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import nn

from telefuser import kernel, platforms

logger = logging.getLogger(__name__)

# The native forms compute everything else (float64, float8) as well.
KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Looked up once: the choice is made some hundred times a model's forward pass.
_TENSOR, _PARAMETER = torch.Tensor, nn.Parameter
# GPU implementations are Triton kernels; an NPU's are not.
WITHOUT_TRITON = frozenset({"npu"})


def _choose(op, platform, values: list) -> tuple[str | None, torch.device | None]:
    """The first of the platform's op keys that may run `op` on these arguments (None: native), and their device."""
    device = dtype = None
    grad = torch.is_grad_enabled()
    for value in values:
        kind = type(value)
        if value is None or kind is float:
            continue
        if kind is _TENSOR or kind is _PARAMETER:
            if grad and value.requires_grad:
                return None, device
            if device is None:
                device, dtype = value.device, value.dtype
            elif value.device != device:
                # PyTorch then says which devices differ; a kernel would only see a pointer it cannot read.
                return None, device
        elif kind is tuple or kind is list:
            values.extend(value)
        elif isinstance(value, torch.Tensor):
            # Fake, distributed and other subclasses hold no memory of their own that a kernel could read.
            return None, device
    if device is None or device.type != platform.device_type:
        return None, device
    if op.kernel_dtypes is not None and dtype not in op.kernel_dtypes:
        return None, device
    key = op.first_of(platform.op_keys)
    if key is None or key in WITHOUT_TRITON or _triton_is_here(platform.device_name):
        return key, device
    return None, device


def _triton_is_here(device_name: str) -> bool:
    return kernel.HAS_TRITON or _warn_of_missing_triton(device_name)


@functools.cache
def _warn_of_missing_triton(device_name: str) -> bool:
    logger.warning(
        "Triton cannot be imported, so operators on %s use their slower PyTorch form; install triton", device_name
    )
    return False


@functools.cache
def _has_one_device(platform) -> bool:
    return platform.device_count() == 1


def _launch(platform, device: torch.device, implementation: Callable, args: tuple, kwargs: dict):
    """Run a kernel implementation with the tensors' own device as the current one, which Triton launches on."""
    if device.index is None or _has_one_device(platform) or device.index == platform.current_device():
        return implementation(*args, **kwargs)
    with platform.device_ctx(device):
        return implementation(*args, **kwargs)


class CustomOp(nn.Module):
    """An operator with a native form and kernels for some platforms; a call runs the one that the rule chooses.

    A subclass defines `forward_native` in plain PyTorch: the truth that every other form must agree with,
    differentiable and traceable. It may define `forward_cuda` (also used on ROCm), `forward_rocm` and `forward_npu`,
    all with the same arguments. The first tensor argument decides the device and dtype.
    """

    # Dtypes of the first tensor for which kernels may run; None is any.
    kernel_dtypes: frozenset[torch.dtype] | None = KERNEL_DTYPES

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.forward_native(*args, **kwargs)
        platform = platforms.current_platform
        if platform.op_keys:
            key, device = _choose(self, platform, [*args, *kwargs.values(), *self._parameters.values()])
            if key is not None:
                return _launch(platform, device, getattr(self, f"forward_{key}"), args, kwargs)
        return self.forward_native(*args, **kwargs)

    def defines(self, key: str) -> bool:
        """Whether this class has a `forward_<key>` of its own."""
        return _defines(type(self), key)

    def first_of(self, keys: tuple[str, ...]) -> str | None:
        """The first of `keys` that this class defines."""
        return _first_defined(type(self), keys)

    def forward_native(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} must define forward_native")

    def forward_cuda(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)

    def forward_rocm(self, *args, **kwargs):
        return self.forward_cuda(*args, **kwargs)

    def forward_npu(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)


def _defines(kind: type[CustomOp], key: str) -> bool:
    name = f"forward_{key}"
    return getattr(kind, name, None) is not getattr(CustomOp, name, None)


@functools.cache
def _first_defined(kind: type[CustomOp], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if _defines(kind, key)), None)


class CustomOpFunction:
    """The same rule for an operator without parameters: a callable with one implementation a platform.

    name: for messages.  native_impl, cuda_impl, npu_impl, rocm_impl: same arguments each; only the first is required.
    compiled_impl: what `torch.compile` sees instead of native_impl, an operator registered with `register_custom_op`.
    It serves tables and other arguments without gradient only, so a tensor after the first that needs one means native.
    traced_impl: what `torch.compile` traces instead of native_impl, where a composition of other operators suits it
    better.
    """

    kernel_dtypes: frozenset[torch.dtype] | None = KERNEL_DTYPES

    def __init__(
        self,
        name: str,
        native_impl: Callable,
        cuda_impl: Callable | None = None,
        npu_impl: Callable | None = None,
        rocm_impl: Callable | None = None,
        *,
        compiled_impl: Callable | None = None,
        traced_impl: Callable | None = None,
    ):
        self.name = name
        self.native_impl = native_impl
        self.cuda_impl = cuda_impl
        self.npu_impl = npu_impl
        self.rocm_impl = rocm_impl
        self.compiled_impl = compiled_impl
        self.traced_impl = traced_impl or native_impl
        self._first: dict[tuple[str, ...], str | None] = {}

    def __repr__(self) -> str:
        return f"CustomOpFunction({self.name!r})"

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            if self.compiled_impl is None or any(t.requires_grad for t in args[1:] if isinstance(t, torch.Tensor)):
                return self.traced_impl(*args, **kwargs)
            return self.compiled_impl(*args, **kwargs)
        return self.eager(*args, **kwargs)

    def eager(self, *args, **kwargs):
        """The rule without its first step; what a registered opaque operator runs."""
        platform = platforms.current_platform
        if platform.op_keys:
            key, device = _choose(self, platform, [*args, *kwargs.values()])
            if key is not None:
                return _launch(platform, device, getattr(self, f"{key}_impl"), args, kwargs)
        return self.native_impl(*args, **kwargs)

    def defines(self, key: str) -> bool:
        """Whether there is an implementation for `key`."""
        return getattr(self, f"{key}_impl", None) is not None

    def first_of(self, keys: tuple[str, ...]) -> str | None:
        """The first of `keys` that there is an implementation for."""
        if keys not in self._first:
            self._first[keys] = next((key for key in keys if self.defines(key)), None)
        return self._first[keys]


def register_custom_op(op_name: str, mutates_args: tuple[str, ...] = (), fake_impl: Callable | None = None) -> Callable:
    """Decorator: make an annotated function one opaque node for `torch.compile`, `telefuser::<op_name>`.

    mutates_args: arguments that it writes to.  fake_impl: gives the result's shape, strides, dtype and device without
    computing. In eager mode call the function itself: the registered operator's boundary costs tens of microseconds.
    """

    def register(function: Callable) -> Callable:
        op = torch.library.custom_op(f"telefuser::{op_name}", function, mutates_args=mutates_args)
        if fake_impl is not None:
            op.register_fake(fake_impl)
        return op

    return register
