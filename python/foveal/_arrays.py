"""What the functions need of an array's framework. Frameworks are imported only once an array of theirs is here."""

from __future__ import annotations

import sys

from . import _foveal

TYPE_CHECKING = False  # Type checkers take it for True; importing typing takes longer than all of this.
if TYPE_CHECKING:
    from typing import Any, Union

    Array = Any
    """An array of NumPy, PyTorch, JAX, CuPy, or another with DLPack or a buffer."""
    DType = Any
    """A dtype by name ("bfloat16"), or of NumPy, ml_dtypes or PyTorch."""
    Stream = Union[None, int, Any]
    """A CUDA stream: its number, or a stream object; None is the current one of the array's framework."""


class Described:
    """Shape, dtype name and device of an array, and the stream that is current for it (0 on the CPU).

    `view` is the array, or one of NumPy over the same memory where the framework has no views (JAX on the CPU, buffers).
    """

    __slots__ = ("array", "name", "shape", "dtype", "device", "joined", "stream", "view")

    def __init__(self, name: str, value: Array, ndim: int):
        self.array = value
        self.name = name
        self.shape, self.dtype, self.device, self.joined, self.stream = _foveal._describe(name, value)
        if len(self.shape) != ndim:
            raise ValueError(f"{name} is {self}, it must have {ndim} dimensions")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which Foveal does not compute: detach it, or call under torch.no_grad()")
        if torch is not None and isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj()):
            raise ValueError(f"{name} is a view that PyTorch negates or conjugates as it reads it: pass {name}.resolve_neg().resolve_conj()")
        self.view = value
        if self.device == "cpu" and (_is_jax(value) or not hasattr(value, "reshape")):
            import numpy

            self.view = numpy.asarray(value)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"


def _framework(value: Array) -> str:
    return type(value).__module__.partition(".")[0]


def _is_jax(value: Array) -> bool:
    return _framework(value) in ("jax", "jaxlib")


def _namespace(value: Array) -> Any:
    """The module whose functions make arrays of this type; None where there is none."""
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    return sys.modules["cupy"] if _framework(value) == "cupy" else None  # CuPy before 14.


def empty(like: Described, shape: tuple[int, ...], dtype: str | None = None) -> Array:
    """An uninitialised array of like's framework and device, of its dtype or of the one named."""
    value = like.array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return torch.empty(shape, dtype=value.dtype if dtype is None else getattr(torch, dtype), device=value.device)
    if _is_jax(value):
        if like.device != "cpu":
            raise _foveal.UnsupportedError(
                f"{like.name} is a JAX array on {like.device}: JAX arrays cannot be written, so an output of another framework must be given as out"
            )
        import numpy

        return numpy.empty(shape, dtype=value.dtype if dtype is None else dtype)
    namespace = _namespace(value)
    if namespace is not None:
        wanted = value.dtype if dtype is None else getattr(namespace, dtype)
        try:
            return namespace.empty(shape, dtype=wanted, device=value.device)
        except TypeError:  # NumPy before 2.0, CuPy before 14: the current device is theirs.
            return namespace.empty(shape, dtype=wanted)
    import numpy

    return numpy.empty(shape, dtype={"f32": "float32", "f16": "float16", "f64": "float64"}[like.dtype] if dtype is None else dtype)


def finish(like: Described, result: Array) -> Array:
    """What empty() made for `like`, as an array of its framework."""
    if _is_jax(like.array):
        import jax.numpy

        return jax.numpy.asarray(result)
    return result


def int32(like: Described, values: list[int]) -> Array:
    """A vector of metadata on like's device."""
    if like.device == "cpu":
        from array import array

        return array("i", values)
    value = like.array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return torch.tensor(values, dtype=torch.int32, device=value.device)
    namespace = _namespace(value)
    return namespace.asarray(values, dtype=namespace.int32)


def head_first(value: Array, batch: int) -> Array:
    """[heads, batch · rows] → [batch, heads, rows], a view where the framework has views."""
    heads, rows = value.shape[0], value.shape[1] // max(batch, 1)
    value = value.reshape(heads, batch, rows)
    if hasattr(value, "permute"):  # PyTorch
        return value.permute(1, 0, 2)
    return value.transpose(1, 0, 2)
