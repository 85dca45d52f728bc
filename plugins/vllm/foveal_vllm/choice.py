"""How vLLM's words become Foveal's: the platform, dtypes, windows, and whether Foveal serves a layer."""

import foveal
import torch
from vllm.platforms import current_platform

KV_CACHE_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Those that Foveal's caches can have; None is the model's dtype."""


def place() -> tuple[str, str]:
    """The device kind and Foveal's backend for it."""
    if current_platform.is_cuda():
        return "cuda", "FLASH_ATTN"
    if current_platform.is_cpu():
        return "cpu", "CPU_ATTN"
    raise NotImplementedError(f"Foveal serves vLLM on CUDA and on the CPU, not on {current_platform.device_name}")


def capability(of_device) -> int | None:
    return None if of_device is None else 10 * of_device.major + of_device.minor


def window_of(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """(left, right) without the token itself; vLLM counts it, and means both sides where attention is not causal."""
    if sliding_window is None:
        return (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def reasons_against(spec: foveal.Spec, block_size: int | None, device_capability) -> list[str]:
    device, backend = place()
    selection = foveal.explain(
        spec, device=device, backend=backend, block_size=block_size, compute_capability=capability(device_capability)
    )
    return selection.candidates[0]["reasons"]


def select(spec: foveal.Spec) -> foveal.Backend:
    """Raises foveal.UnsupportedError with every reason."""
    device, backend = place()
    return foveal.select(
        spec, device=device, backend=backend, compute_capability=capability(current_platform.get_device_capability())
    )


def split(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values, [num_blocks, block_size, num_kv_heads, head_size] each, whatever the strides: of [num_blocks, 2, …] or of
    [2, num_blocks, …], as caches were before."""
    if kv_cache.ndim != 5 or 2 not in kv_cache.shape[:2]:
        raise ValueError(f"kv_cache is {list(kv_cache.shape)}, it must be [num_blocks, 2, block_size, num_kv_heads, head_size]")
    key, value = kv_cache.unbind(1 if kv_cache.shape[1] == 2 else 0)
    return key, value
