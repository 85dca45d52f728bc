#pragma once

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>

#include "cuda/jit.h"
#include "cuda/nvrtc.h"

namespace foveal::cuda::testing {

/// An empty folder, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "foveal-test-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) {
      path_ = name;
    }
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// What is logged while it is in scope.
class CapturedLog {
 public:
  CapturedLog() : previous_(spdlog::default_logger()) {
    auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(stream_, true);
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", sink));
  }
  ~CapturedLog() { spdlog::set_default_logger(previous_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  std::string text() const { return stream_.str(); }
  std::size_t lines() const {
    const std::string all = text();
    return static_cast<std::size_t>(std::count(all.begin(), all.end(), '\n'));
  }

 private:
  std::ostringstream stream_;
  std::shared_ptr<spdlog::logger> previous_;
};

/// out[i] = kScale · in[i] + offset, with one included header and a constant.
inline KernelKey scale_key(const std::string& arch, int scale = 3) {
  KernelKey key;
  key.source = "scale.cu";
  key.entry = "scale";
  key.arch = arch;
  key.headers["scale.cu"] = R"(#include "config.cuh"
#include "multiply.cuh"
extern "C" __global__ void scale(float* out, const float* in, float offset, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = multiply(in[i]) + offset;
}
)";
  key.headers["multiply.cuh"] =
      "#pragma once\nconstexpr float multiply(float x) { return config::kScale * x; }\n";
  key.set("kScale", scale);
  return key;
}

#define SKIP_WITHOUT_NVRTC() \
  if (!::foveal::cuda::nvrtc().available) GTEST_SKIP() << ::foveal::cuda::nvrtc().reason

}  // namespace foveal::cuda::testing
