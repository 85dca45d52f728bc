# Block pool, scheduler, step builder, model runner.
target_sources(foveal_serving PRIVATE
  attention_device.cpp
  block_pool.cpp
  engine.cpp
  layers.cpp
  linear.cpp
  model_runner.cpp
  request.cpp
  sampler.cpp
  scheduler.cpp
  step_builder.cpp
  step_tensors.cpp)
# Device memory and copies: the library has them too, but hides them.
if(FOVEAL_CUDA)
  target_sources(foveal_serving PRIVATE cuda_device.cpp)
  target_link_libraries(foveal_serving PRIVATE foveal_cuda_host)
else()
  target_sources(foveal_serving PRIVATE device_without_cuda.cpp)
endif()
