#include "bench/machine.h"
#include "core/check.h"

namespace foveal::bench {

std::unique_ptr<Machine> make_cuda_machine() {
  fail(ErrorCode::unsupported,
       "device is cuda, this build has no CUDA: configure it with FOVEAL_CUDA=ON");
}

}  // namespace foveal::bench
