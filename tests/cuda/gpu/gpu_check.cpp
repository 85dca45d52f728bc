#include "gpu_check.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>

#include "cuda/kernel_pack.h"
#include "cuda/kernel_program.h"
#include "cuda/nvrtc.h"
#include "foveal/error.h"

// What the fake driver of the other tests cannot show: that a real one takes our calls as they are
// meant. A program of its own, linked so that it runs where only the driver is installed.
namespace foveal::cuda::gpu_check {
namespace {

using Clock = std::chrono::steady_clock;

int failures = 0;

void report(const std::string& what, bool good, const std::string& more = {}) {
  fmt::print("{:<58} {}  {}\n", what, good ? "ok" : "FAILED", more);
  failures += good ? 0 : 1;
}

template <typename Action>
double milliseconds(Action&& action) {
  const auto begin = Clock::now();
  action();
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Expects an Error of this code, and shows its text.
template <typename Action>
void expect_error(const std::string& what, ErrorCode code, Action&& action) {
  try {
    action();
    report(what, false, "no error");
  } catch (const Error& error) {
    report(what, error.code() == code, error.what());
  }
}

constexpr int kCount = 100'000;

struct Data {
  explicit Data(int device)
      : in(device, kCount * sizeof(float)), out(device, kCount * sizeof(float)), host(kCount) {
    const ContextGuard guard(device);
    for (int i = 0; i < kCount; ++i) {
      host[static_cast<std::size_t>(i)] = static_cast<float>(i % 1000) - 300.5F;
    }
    copy_async(in.data(), host.data(), in.bytes(), nullptr);
    synchronize(nullptr);
  }
  void clear(Stream stream) const { fill_async(out.data(), 0xff, out.bytes(), stream); }
  bool is_scaled_by(int factor, Stream stream) const {
    std::vector<float> result(kCount);
    copy_async(result.data(), out.data(), out.bytes(), stream);
    synchronize(stream);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (!(result[i] == static_cast<float>(factor) * host[i])) {
        return false;
      }
    }
    return true;
  }
  DeviceBuffer in, out;
  std::vector<float> host;
};

void check_device(int device) {
  const DeviceProperties& p = device_properties(device);
  report(
      "device", p.sm_count > 0,
      fmt::format("{}, sm_{}, {} SMs, L2 {} MiB, {:.0f} GiB, {} KiB shared a block ({} an SM), "
                  "driver {}",
                  p.name, p.compute_capability, p.sm_count, p.l2_bytes >> 20,
                  static_cast<double>(p.memory_bytes) / (1 << 30), p.shared_bytes_per_block >> 10,
                  p.shared_bytes_per_sm >> 10, driver_version()));
  const double open = milliseconds([] { nvrtc(); });
  report("NVRTC", nvrtc().available,
         fmt::format("{} ({}), opened in {:.1f} ms", nvrtc().path, nvrtc().signature, open));
}

void check_times(int device, const Data& data) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "foveal-gpu-check";
  std::filesystem::remove_all(folder);
  const KernelKey key = scale_key(2, device);
  for (const char* what : {"prepare, cold (compile and load)", "prepare, warm (read and load)"}) {
    Jit jit({.cache_folder = folder});
    const Kernel* kernel = nullptr;
    const double total = milliseconds([&] { kernel = jit.prepare(key, device); });
    report(what,
           kernel->attributes.registers == kernel->resources.registers &&
               kernel->attributes.static_shared_bytes == kernel->resources.static_shared_bytes,
           fmt::format("{:.2f} ms, of it the cubin {:.2f} ms; {} registers (driver) {} (ELF)",
                       total, jit.compile(key)->milliseconds, kernel->attributes.registers,
                       kernel->resources.registers));
  }
  std::filesystem::remove_all(folder);

  Jit& jit = Jit::global();
  const Kernel& kernel = *jit.prepare(key, device);
  const OwnedStream stream(device);
  const ContextGuard outer(device);
  constexpr int kRounds = 2000;
  const LaunchConfig config{.grid = {(kCount + 255) / 256}, .block = {256}, .stream = stream.get()};
  const double launching = milliseconds([&] {
    for (int i = 0; i < kRounds; ++i) {
      launch(kernel, config, data.out.as<float>(), data.in.as<const float>(), kCount);
    }
  });
  synchronize(stream.get());
  const double guarding = milliseconds([&] {
    for (int i = 0; i < kRounds; ++i) {
      const ContextGuard guard(device);
    }
  });
  report("host cost", true,
         fmt::format("launch {:.2f} us, context guard {:.3f} us", launching * 1000 / kRounds,
                     guarding * 1000 / kRounds));
  Event begin(device);
  Event end(device);
  begin.record(stream.get());
  launch(kernel, config, data.out.as<float>(), data.in.as<const float>(), kCount);
  end.record(stream.get());
  report("events", Event::elapsed_ms(begin, end) > 0,
         fmt::format("kernel {:.1f} us", 1000 * Event::elapsed_ms(begin, end)));
}

void check_graphs(int device, const Data& data) {
  Jit jit(JitOptions{});
  const OwnedStream stream(device);
  const ContextGuard guard(device);
  // First use inside a capture in the strictest mode, by this thread and by another one.
  Graph own = Graph::capture(device, stream.get(), [&] {
    report("is_capturing", is_capturing(stream.get()));
    scale(data.out.as<float>(), data.in.as<float>(), kCount, 5, stream.get(), device, jit);
  });
  data.clear(stream.get());
  own.launch(stream.get());
  report("first use of a kernel inside a capture", data.is_scaled_by(5, stream.get()));

  const Kernel* other = nullptr;
  std::string error;
  Graph graph = Graph::capture(device, stream.get(), [&] {
    std::thread([&] {
      try {
        other = jit.prepare(scale_key(7, device), device);
      } catch (const Error& caught) {
        error = caught.what();
      }
    }).join();
    scale(data.out.as<float>(), data.in.as<float>(), kCount, 5, stream.get(), device, jit);
  });
  data.clear(stream.get());
  graph.launch(stream.get());
  report("a kernel loaded by another thread during a capture",
         other != nullptr && data.is_scaled_by(5, stream.get()), error);
  expect_error("waiting inside a capture is an error", ErrorCode::device,
               [&] { Graph::capture(device, stream.get(), [&] { synchronize(stream.get()); }); });
  data.clear(stream.get());
  own.launch(stream.get());
  report("graphs work after a broken capture", data.is_scaled_by(5, stream.get()));
}

void check_launches(int device, const Data& data) {
  Jit& jit = Jit::global();
  const ContextGuard guard(device);
  const Kernel& kernel = *jit.prepare(scale_key(3, device), device);
  const int most = device_properties(device).shared_bytes_per_block;
  kernel.set_max_dynamic_shared_bytes(most);
  data.clear(nullptr);
  launch(kernel,
         {.grid = {(kCount + 255) / 256},
          .block = {256},
          .dynamic_shared_bytes = static_cast<unsigned>(most)},
         data.out.as<float>(), data.in.as<const float>(), kCount);
  report(fmt::format("{} bytes of dynamic shared memory", most), data.is_scaled_by(3, nullptr),
         fmt::format("{} block an SM", max_active_blocks_per_sm(kernel.function, 256, most)));
  expect_error("too large a block", ErrorCode::device, [&] {
    launch(kernel, {.grid = {1}, .block = {2048}}, data.out.as<float>(), data.in.as<const float>(),
           kCount);
  });
  expect_error("wrong parameters", ErrorCode::invalid_argument,
               [&] { launch(kernel, {.grid = {1}, .block = {32}}, data.out.as<float>(), 1); });
  expect_error("too much memory", ErrorCode::out_of_memory,
               [&] { DeviceBuffer(device, std::size_t{1} << 44); });
  KernelKey foreign = scale_key(3, device);
  foreign.arch = device_properties(device).compute_capability >= 90 ? "sm_80" : "sm_90a";
  expect_error("a cubin of another architecture", ErrorCode::device,
               [&] { jit.prepare(foreign, device); });

  if (device_properties(device).compute_capability >= 90) {
    const Kernel& cluster = *jit.prepare(cluster_key(device), device);
    const OwnedStream stream(device);
    const DeviceBuffer out(device, 16 * sizeof(int));
    const auto clusters_of = [&](unsigned size, bool cooperative) {
      launch(cluster,
             {.grid = {16},
              .block = {64},
              .stream = stream.get(),
              .cluster = {size, 1, 1},
              .programmatic_serialization = !cooperative,
              .cooperative = cooperative},
             out.as<int>());
      std::vector<int> seen(16);
      copy_async(seen.data(), out.data(), out.bytes(), stream.get());
      synchronize(stream.get());
      return seen == std::vector<int>(16, static_cast<int>(size));
    };
    report("clusters of 4, programmatic serialization", clusters_of(4, false));
    report("no cluster, cooperative", clusters_of(1, true));
    allow_non_portable_cluster(cluster.function);
    report("clusters of 16", clusters_of(16, false));
  }
}

void check_tensor_map(int device) {
  if (device_properties(device).compute_capability < 90) {
    return;
  }
  const ContextGuard guard(device);
  constexpr int kWidth = 100;
  constexpr int kHeight = 20;
  const DeviceBuffer in(device, kWidth * kHeight * sizeof(float));
  const DeviceBuffer out(device, 8 * 32 * sizeof(float));
  std::vector<float> host(kWidth * kHeight);
  for (std::size_t i = 0; i < host.size(); ++i) {
    host[i] = static_cast<float>(i + 1);
  }
  copy_async(in.data(), host.data(), in.bytes(), nullptr);
  const TensorMap map = encode_tiled({.type = TensorMapType::f32,
                                      .rank = 2,
                                      .address = in.data(),
                                      .size = {kWidth, kHeight},
                                      .stride_bytes = {0, kWidth * sizeof(float)},
                                      .box = {32, 8}});
  constexpr int kX = 90;  // Reaches over both edges: those elements read as zero.
  constexpr int kY = 15;
  launch(*Jit::global().prepare(tensor_map_key(device), device), {.grid = {1}, .block = {128}}, map,
         out.as<float>(), kX, kY);
  std::vector<float> tile(8 * 32);
  copy_async(tile.data(), out.data(), out.bytes(), nullptr);
  synchronize(nullptr);
  bool good = true;
  for (int y = 0; y < 8; ++y) {
    for (int x = 0; x < 32; ++x) {
      const bool inside = kX + x < kWidth && kY + y < kHeight;
      const float wanted = inside ? static_cast<float>((kY + y) * kWidth + kX + x + 1) : 0;
      good = good && tile[static_cast<std::size_t>(y * 32 + x)] == wanted;
    }
  }
  report("TMA through a tensor map, out of bounds as zero", good);
}

void check_memory(int device) {
  const ContextGuard guard(device);
  const PinnedBuffer pinned(device, 4096);
  const DeviceBuffer buffer(device, 4096);
  const OwnedStream stream(device);
  fill32_async(buffer.data(), 0xabcd1234, 1024, stream.get());
  copy_async(pinned.data(), buffer.data(), 4096, stream.get());
  Event done(device, false);
  done.record(stream.get());
  done.synchronize();
  report("pinned memory, fill and copy", pinned.as<std::uint32_t>()[1023] == 0xabcd1234U);
  int on_stack = 0;
  report("device_of",
         device_of(buffer.data()) == device && !device_of(&on_stack) && !device_of(pinned.data()));
  const auto [available_bytes, total] = memory_info();
  report("memory_info", available_bytes <= total && total > 0);
}

void check_pack(int device, const Data& data) {
  const KernelKey key = scale_key(11, device);
  const auto cubin = Jit(JitOptions{}).compile(key);
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / "foveal-gpu-check.pack";
  KernelPack::write(path, {{assemble(key).id, cubin.get()}});
  Jit jit({.packs = {path}});
  data.clear(nullptr);
  scale(data.out.as<float>(), data.in.as<float>(), kCount, 11, nullptr, device, jit);
  const ContextGuard guard(device);
  report("a kernel from a pack",
         data.is_scaled_by(11, nullptr) && jit.compile(key)->origin == Cubin::Origin::pack);
  std::filesystem::remove(path);
}

int run() {
  if (!available()) {
    fmt::print("skipped: {}\n", unavailable_reason());
    return 77;
  }
  constexpr int kDevice = 0;
  check_device(kDevice);
  const Data data(kDevice);
  check_memory(kDevice);
  check_times(kDevice, data);
  check_launches(kDevice, data);
  check_graphs(kDevice, data);
  check_pack(kDevice, data);
  check_tensor_map(kDevice);  // Last: what goes wrong in it breaks the context.
  fmt::print("{}\n", failures == 0 ? "all passed" : fmt::format("{} FAILED", failures));
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace foveal::cuda::gpu_check

int main() {
  try {
    return foveal::cuda::gpu_check::run();
  } catch (const std::exception& error) {
    fmt::print("FAILED: {}\n", error.what());
    return 1;
  }
}
