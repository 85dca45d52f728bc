#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "cuda/cubin_report.h"
#include "cuda/kernel_pack.h"
#include "cuda/kernel_program.h"
#include "cuda/test_support.h"
#include "support/expect_error.h"

namespace foveal::cuda {
namespace {

using foveal::testing::expect_error;
using testing::CapturedLog;
using testing::scale_key;
using testing::TemporaryFolder;

JitOptions options_in(const std::filesystem::path& folder) { return {.cache_folder = folder}; }

TEST(Jit, CompilesForEveryArchitectureTheCompilerKnows) {
  SKIP_WITHOUT_NVRTC();
  Jit jit(JitOptions{});
  for (const int capability : {80, 86, 89, 90, 100, 120}) {
    const std::string arch = arch_name(capability);
    if (!nvrtc_knows(arch)) {
      std::printf("NVRTC %d.%d does not know %s\n", nvrtc().major, nvrtc().minor, arch.c_str());
      continue;
    }
    const auto cubin = jit.compile(scale_key(arch));
    EXPECT_EQ(cubin->origin, Cubin::Origin::compiled);
    EXPECT_THAT(cubin->resources.parameter_bytes, ::testing::ElementsAre(8, 8, 4, 4)) << arch;
    EXPECT_GT(cubin->resources.registers, 4) << arch;
    EXPECT_LT(cubin->resources.registers, 40) << arch;
    EXPECT_EQ(cubin->resources.stack_bytes, 0) << arch;
    EXPECT_EQ(cubin->resources.spill_store_bytes, 0) << arch;
    EXPECT_EQ(cubin->resources.static_shared_bytes, 0) << arch;
    std::printf("%s: %.0f ms, %zu bytes\n", arch.c_str(), cubin->milliseconds, cubin->image.size());
  }
}

TEST(Jit, ReportsSpillsStackAndSharedMemory) {
  SKIP_WITHOUT_NVRTC();
  KernelKey key;
  key.source = "heavy.cu";
  key.entry = "heavy";
  key.arch = "sm_80";
  key.headers["heavy.cu"] = R"(
extern "C" __global__ void __launch_bounds__(1024) heavy(float* data, int stride) {
  __shared__ float scratch[100];
  float values[160];
  for (int i = 0; i < 160; ++i) values[i] = data[i * stride + threadIdx.x];
  scratch[threadIdx.x % 100] = values[0];
  __syncthreads();
  for (int i = 0; i < 160; ++i) data[i] = values[i] * values[159 - i] + scratch[i % 100];
}
)";
  for (const char* arch : {"sm_80", "sm_90a", "sm_100a", "sm_120"}) {
    if (!nvrtc_knows(arch)) {
      continue;
    }
    key.arch = arch;
    const KernelResources resources = Jit(JitOptions{}).compile(key)->resources;
    EXPECT_LE(resources.registers, 64) << arch;  // 65536 for 1024 threads.
    EXPECT_GT(resources.stack_bytes, 0) << arch;
    EXPECT_GT(resources.spill_store_bytes, 0) << arch;
    EXPECT_GT(resources.spill_load_bytes, 0) << arch;
    EXPECT_EQ(resources.static_shared_bytes, 400) << arch;
  }
}

TEST(Jit, ReadsReportsAsTheAssemblerWritesThem) {
  KernelResources resources;
  resources.spill_store_bytes = resources.spill_load_bytes = KernelResources::kUnknown;
  add_spills_from_log(resources, "", "k");
  EXPECT_EQ(resources.spill_store_bytes, KernelResources::kUnknown);
  const std::string log =
      "ptxas info    : Function properties for other\n"
      "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Function properties for k\n"
      "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n";
  add_spills_from_log(resources, log, "k");
  EXPECT_EQ(resources.spill_store_bytes, 12);
  EXPECT_EQ(resources.spill_load_bytes, 20);

  std::vector<std::byte> nonsense(100, std::byte{1});
  expect_error(
      ErrorCode::compile, [&] { resources_from_elf(nonsense, "k"); }, "no ELF file");
}

TEST(Jit, SurvivesDamagedElfTables) {
  SKIP_WITHOUT_NVRTC();
  const auto cubin = Jit(JitOptions{}).compile(scale_key("sm_80"));
  std::uint32_t state = 1;
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> image = cubin->image;
    for (int i = 0; i < 4; ++i) {
      state = state * 1664525U + 1013904223U;
      // Headers lie at the front, section tables at the end.
      const std::size_t span = (state >> 8) % 2 == 0 ? 64 : image.size();
      image[(state >> 9) % span] = static_cast<std::byte>(state >> 24);
    }
    if (round % 4 == 0) {
      image.resize(state % image.size());
    }
    try {
      resources_from_elf(image, "scale");
    } catch (const Error&) {
      // Refusing is fine; reading outside of the image is not.
    }
  }
}

TEST(Jit, FailsWithTheCompilersLog) {
  SKIP_WITHOUT_NVRTC();
  const TemporaryFolder folder;
  Jit jit(options_in(folder.path()));
  KernelKey broken = scale_key("sm_80");
  broken.headers["multiply.cuh"] = "constexpr float multiply(float x) { return undeclared * x; }\n";
  expect_error(
      ErrorCode::compile, [&] { jit.compile(broken); }, "scale.cu", "sm_80", "multiply.cuh(1)",
      "undeclared");
  KernelKey misnamed = scale_key("sm_80");
  misnamed.entry = "scales";
  expect_error(
      ErrorCode::compile, [&] { jit.compile(misnamed); }, "'scales'");
  expect_error(
      ErrorCode::compile, [&] { jit.compile(scale_key("sm_10")); }, "sm_10");
  expect_error(
      ErrorCode::compile,
      [&] {
        jit.compile_all({broken, scale_key("sm_80"), misnamed});
      },
      "2 of 3", "undeclared", "'scales'");
  // A failure is not remembered.
  EXPECT_NO_THROW(jit.compile(scale_key("sm_80")));
}

TEST(Jit, TakesWarmKernelsFromDisk) {
  SKIP_WITHOUT_NVRTC();
  const TemporaryFolder folder;
  const KernelKey key = scale_key("sm_80");
  const auto cold = Jit(options_in(folder.path())).compile(key);
  Jit jit(options_in(folder.path()));
  const auto warm = jit.compile(key);
  EXPECT_EQ(warm->origin, Cubin::Origin::disk);
  EXPECT_EQ(warm->image, cold->image);
  EXPECT_EQ(warm->log, cold->log);
  EXPECT_EQ(jit.compile(key), warm);
  std::printf("cold %.1f ms, warm %.3f ms\n", cold->milliseconds, warm->milliseconds);

  // A damaged file is compiled again, and replaced.
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    std::filesystem::resize_file(entry.path(), 100);
  }
  const CapturedLog log;
  EXPECT_EQ(Jit(options_in(folder.path())).compile(key)->origin, Cubin::Origin::compiled);
  EXPECT_EQ(log.lines(), 1U);
  EXPECT_EQ(Jit(options_in(folder.path())).compile(key)->origin, Cubin::Origin::disk);
}

TEST(Jit, CompilesOnceHoweverManyAsk) {
  SKIP_WITHOUT_NVRTC();
  Jit jit(JitOptions{});
  std::vector<std::shared_ptr<const Cubin>> cubins(8);
  std::vector<std::thread> threads;
  for (auto& cubin : cubins) {
    threads.emplace_back([&] { cubin = jit.compile(scale_key("sm_80")); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto& cubin : cubins) {
    EXPECT_EQ(cubin, cubins[0]);  // The very same object.
  }
}

/// What a machine without NVRTC does. Only right in a process of its own, where nothing has opened
/// NVRTC yet; exits with 0 when everything is as it should be.
[[noreturn]] void run_without_nvrtc(const std::filesystem::path& pack) {
  setenv("FOVEAL_NVRTC", "/nonexistent/libnvrtc.so", 1);
  if (nvrtc().available || nvrtc().reason.find("/nonexistent/libnvrtc.so") == std::string::npos) {
    std::exit(1);
  }
  Jit jit({.packs = {pack}});
  if (jit.compile(scale_key("sm_80"))->origin != Cubin::Origin::pack) {
    std::exit(2);
  }
  try {
    jit.compile(scale_key("sm_80", 5));
  } catch (const Error& error) {
    const std::string text = error.what();
    std::exit(error.code() == ErrorCode::compile && text.find("kScale=5") != std::string::npos &&
                      text.find("FOVEAL_KERNEL_PACK") != std::string::npos
                  ? 0
                  : 3);
  }
  std::exit(4);
}

TEST(JitDeathTest, LivesOnPacksWithoutNvrtc) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "a.pack";
  Cubin cubin{.key_text = scale_key("sm_80").text(), .entry = "scale", .arch = "sm_80"};
  cubin.image.resize(10);
  KernelPack::write(path, {{assemble(scale_key("sm_80")).id, &cubin}});
  EXPECT_EXIT(run_without_nvrtc(path), ::testing::ExitedWithCode(0), "");
}

TEST(JitOptions, AreReadFromTheEnvironment) {
  setenv("FOVEAL_CACHE_DIR", "/a", 1);
  setenv("XDG_CACHE_HOME", "/b", 1);
  EXPECT_EQ(JitOptions::from_environment().cache_folder, "/a/cubins");
  unsetenv("FOVEAL_CACHE_DIR");
  EXPECT_EQ(JitOptions::from_environment().cache_folder, "/b/foveal/cubins");
  setenv("FOVEAL_CACHE_MAX_MB", "7", 1);
  setenv("FOVEAL_KERNEL_PACK", "/x.pack:/y.pack", 1);
  EXPECT_EQ(JitOptions::from_environment().max_cache_bytes, 7 << 20);
  EXPECT_THAT(JitOptions::from_environment().packs, ::testing::ElementsAre("/x.pack", "/y.pack"));
  setenv("FOVEAL_CACHE_MAX_MB", "many", 1);
  expect_error(
      ErrorCode::invalid_argument, [] { JitOptions::from_environment(); }, "FOVEAL_CACHE_MAX_MB",
      "many");
  unsetenv("FOVEAL_CACHE_MAX_MB");
  unsetenv("FOVEAL_KERNEL_PACK");
  unsetenv("XDG_CACHE_HOME");
}

}  // namespace
}  // namespace foveal::cuda
