#include "cuda/driver.h"

#include <dlfcn.h>
#include <gmock/gmock.h>

#include <stdexcept>
#include <thread>

#include "cuda/kernel_pack.h"
#include "cuda/kernel_program.h"
#include "cuda/test_support.h"
#include "support/expect_error.h"

// Against the libcuda.so.1 of fake_driver.cpp, which the test program finds before any other.
namespace foveal::cuda {
namespace {

using foveal::testing::expect_error;

/// As in fake_driver.cpp.
struct FakeState {
  int loads, strict_loads, retains, launches, attributes;
  unsigned cluster_x;
  int flags;
  unsigned grid_x;
  int first_argument;
};

FakeState& fake() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return *reinterpret_cast<FakeState* (*)()>(dlsym(library, "fake_state"))();
}

/// Sets a variable of the fake for as long as it is in scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

TEST(Driver, TellsWhatTheDeviceIs) {
  ASSERT_TRUE(available()) << unavailable_reason();
  EXPECT_EQ(driver_version(), 13000);
  EXPECT_EQ(device_count(), 1);
  const DeviceProperties& properties = device_properties(0);
  EXPECT_EQ(properties.name, "Fake H200");
  EXPECT_EQ(properties.compute_capability, 90);
  EXPECT_EQ(properties.sm_count, 132);
  EXPECT_EQ(properties.shared_bytes_per_block, 227 << 10);
  EXPECT_EQ(properties.memory_bytes, std::int64_t{141} << 30);
  expect_error(
      ErrorCode::invalid_argument, [] { device_properties(1); }, "cuda:1");
}

TEST(Driver, RetainsThePrimaryContextOnceAndRestoresWhatWasCurrent) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 100; ++round) {
        const ContextGuard outer(0);
        const ContextGuard inner(0);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(fake().retains, 1);
}

TEST(Driver, NamesTheCallThatFailed) {
  const ContextGuard guard(0);
  {
    const Environment fail("FAKE_CUDA_FAIL", "cuMemAlloc_v2=2");
    expect_error(
        ErrorCode::out_of_memory, [] { DeviceBuffer(0, 12345); }, "cuMemAlloc_v2",
        "CUDA_ERROR_OUT_OF_MEMORY", "12345 bytes");
  }
  {
    const Environment fail("FAKE_CUDA_FAIL", "cuStreamSynchronize=700");
    expect_error(
        ErrorCode::device, [] { synchronize(nullptr); }, "cuStreamSynchronize",
        "as the test asked");
  }
  {
    const Environment fail("FAKE_CUDA_FAIL", "cuLaunchKernelEx=1");
    void* parameters[1] = {nullptr};
    expect_error(
        ErrorCode::device, [&] { launch(nullptr, {.grid = {5}, .block = {256}}, parameters); },
        "cuLaunchKernelEx", "grid 5x1x1", "block 256x1x1");
  }
}

TEST(Driver, CopiesAndFills) {
  const ContextGuard guard(0);
  const DeviceBuffer buffer(0, 8);
  fill32_async(buffer.data(), 0x01020304, 2, nullptr);
  fill_async(buffer.data(), 0xff, 4, nullptr);
  std::uint32_t host[2] = {};
  copy_async(host, buffer.data(), 8, nullptr);
  EXPECT_EQ(host[0], 0xffffffffU);
  EXPECT_EQ(host[1], 0x01020304U);
  EXPECT_EQ(device_of(host), std::nullopt);
  DeviceBuffer moved = DeviceBuffer(0, 16);
  moved = DeviceBuffer(0, 0);
  EXPECT_EQ(moved.data(), nullptr);
}

TEST(Driver, PassesAttributesOfLaunches) {
  const ContextGuard guard(0);
  int argument = 42;
  void* parameters[1] = {&argument};
  launch(nullptr, {.grid = {7}, .block = {128}}, parameters);
  EXPECT_EQ(fake().grid_x, 7U);
  EXPECT_EQ(fake().attributes, 0);
  EXPECT_EQ(fake().first_argument, 42);
  launch(nullptr,
         {.grid = {8},
          .block = {128},
          .cluster = {2, 1, 1},
          .programmatic_serialization = true,
          .cooperative = true},
         parameters);
  EXPECT_EQ(fake().attributes, 3);
  EXPECT_EQ(fake().cluster_x, 2U);
  EXPECT_EQ(fake().flags, (1 << 6) | (1 << 2));
  const int launches = fake().launches;
  launch(nullptr, {.grid = {0}, .block = {128}}, parameters);
  EXPECT_EQ(fake().launches, launches) << "an empty grid launches nothing";
}

TEST(Driver, EncodesTensorMaps) {
  TensorMapSpec spec{.rank = 2, .size = {64, 100}, .stride_bytes = {0, 128}, .box = {64, 16}};
  const TensorMap map = encode_tiled(spec);
  EXPECT_EQ(map.opaque[0], 2U);
  EXPECT_EQ(map.opaque[1], 128U);
  spec.rank = 6;
  expect_error(
      ErrorCode::invalid_argument, [&] { encode_tiled(spec); }, "rank", "6");
  spec.rank = 2;
  const Environment fail("FAKE_CUDA_FAIL", "cuTensorMapEncodeTiled=1");
  expect_error(
      ErrorCode::device, [&] { encode_tiled(spec); }, "dimension 1: size 100, stride 128 bytes");
}

TEST(Driver, EndsACaptureWhoseBodyThrows) {
  const OwnedStream stream(0);
  EXPECT_THROW(Graph::capture(0, stream.get(), [] { throw std::runtime_error("body"); }),
               std::runtime_error);
  Graph graph = Graph::capture(0, stream.get(), [] {});
  graph.launch(stream.get());
}

/// A Jit that needs no compiler: its only kernel comes from a pack.
struct PackedJit {
  PackedJit() {
    Cubin cubin{.key_text = key.text(), .entry = "scale", .arch = "sm_90a"};
    cubin.resources.parameter_bytes = {8, 8, 4, 4};
    cubin.image.resize(10);
    const std::filesystem::path path = folder.path() / "a.pack";
    KernelPack::write(path, {{assemble(key).id, &cubin}});
    jit.add_pack(path);
  }
  testing::TemporaryFolder folder;
  KernelKey key = testing::scale_key("sm_90a");
  Jit jit{JitOptions{}};
};

TEST(JitOnDevice, LoadsOnceHoweverManyAskAndOutsideOfCaptures) {
  PackedJit packed;
  const int loads = fake().loads;
  std::vector<const Kernel*> kernels(8);
  std::vector<std::thread> threads;
  for (const Kernel*& kernel : kernels) {
    threads.emplace_back([&] { kernel = packed.jit.prepare(packed.key, 0); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(fake().loads, loads + 1);
  EXPECT_EQ(fake().strict_loads, 0);
  for (const Kernel* kernel : kernels) {
    EXPECT_EQ(kernel, kernels[0]);
  }
  EXPECT_EQ(kernels[0]->attributes.registers, 104);
  EXPECT_NO_THROW(kernels[0]->set_max_dynamic_shared_bytes(200'000));
  expect_error(
      ErrorCode::device, [&] { kernels[0]->set_max_dynamic_shared_bytes(1 << 20); },
      "cuFuncSetAttribute", "1048576 bytes");
}

TEST(JitOnDevice, ChecksTheParametersOfALaunch) {
  PackedJit packed;
  const Kernel& kernel = *packed.jit.prepare(packed.key, 0);
  const ContextGuard guard(0);
  float* out = nullptr;
  const float* in = nullptr;
  EXPECT_NO_THROW(launch(kernel, {.grid = {1}, .block = {32}}, out, in, 1.0F, 5));
  expect_error(
      ErrorCode::invalid_argument,
      [&] { launch(kernel, {.grid = {1}, .block = {32}}, out, in, 1.0F, std::int64_t{5}); },
      "scale", "8, 8, 4, 8 bytes", "8, 8, 4, 4");
}

/// Runs in a process of its own: the driver is opened once.
[[noreturn]] void exit_with_reason() {
  std::fprintf(stderr, "%d [%s]\n", available() ? 1 : 0, unavailable_reason().c_str());
  try {
    const ContextGuard guard(0);
  } catch (const Error& error) {
    std::exit(error.code() == ErrorCode::device ? 0 : 2);
  }
  std::exit(1);
}

TEST(DriverDeathTest, SaysWhyItIsNotAvailable) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto reason_with = [](const char* name, const char* value, const char* pattern) {
    const Environment environment(name, value);
    EXPECT_EXIT(exit_with_reason(), ::testing::ExitedWithCode(0), pattern);
  };
  reason_with("FAKE_CUDA_VERSION", "11080", "0 .*supports CUDA 11.8; 12.0 or later");
  reason_with("FAKE_CUDA_NO_DEVICE", "1", "0 .*finds no device");
  reason_with("FAKE_CUDA_FAIL", "cuInit=100", "0 .*cuInit: CUDA_ERROR_FAKE: as the test asked");
  reason_with("FAKE_CUDA_FAIL", "cuDeviceGetAttribute=3", "0 .*cuDeviceGetAttribute failed");
}

}  // namespace
}  // namespace foveal::cuda
