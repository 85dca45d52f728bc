# Block pool, scheduler, step builder, model runner.
target_sources(foveal_serving PRIVATE
  block_pool.cpp
  engine.cpp
  layers.cpp
  linear.cpp
  model_runner.cpp
  request.cpp
  sampler.cpp
  scheduler.cpp
  step_builder.cpp)
