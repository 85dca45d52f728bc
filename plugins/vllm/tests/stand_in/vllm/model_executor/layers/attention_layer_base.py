class AttentionLayerBase:
    """What the layers of static_forward_context are; they have `impl` and `kv_cache`."""
