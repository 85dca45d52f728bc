#pragma once

#include <cstdint>
#include <string>

#include "foveal/dtype.h"

namespace foveal::bench {

/// The instructions that multiply for the CPU backends in a dtype, and nothing around them: on
/// operands that stay in registers, or in the nearest cache.
class CpuProducts {
 public:
  explicit CpuProducts(DType dtype);

  /// For people: "f32 FMA (AVX3)", "AMX_BF16".
  const std::string& name() const { return name_; }
  double flops() const { return flops_; }
  /// flops() of them, on one thread. Throws device when the sums come out wrong.
  void run() const;

 private:
  std::string name_;
  double flops_ = 0;
  bool bf16_ = false;
};

}  // namespace foveal::bench
