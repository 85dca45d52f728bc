"""Foveal as an attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM`."""


def register() -> None:
    """vLLM calls it in each of its processes, through the entry point."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "foveal_vllm.backend.FovealBackend")
    if current_platform.is_cpu():
        # There vLLM takes CPU_ATTN whatever was selected.
        register_backend(AttentionBackendEnum.CPU_ATTN, "foveal_vllm.cpu.SelectedBackend")
