#include "core/check.h"
#include "serving/attention_device.h"

namespace foveal::serving {

std::unique_ptr<AttentionDevice> open_cuda_device() {
  fail(ErrorCode::unsupported,
       "device is cuda, but this is built without CUDA; configure with -DFOVEAL_CUDA=ON, or run on "
       "the cpu");
}

}  // namespace foveal::serving
