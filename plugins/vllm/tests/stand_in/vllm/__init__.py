"""What foveal_vllm imports of vLLM 0.25, and no more: the interface as it is documented, without an engine behind it."""
