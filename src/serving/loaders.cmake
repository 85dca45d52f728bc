# Model files and tokenizers.
target_sources(foveal_serving PRIVATE)
