# Block pool, scheduler, step builder, model runner.
target_sources(foveal_serving PRIVATE)
