#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "bench/cublas.h"
#include "bench/cuda_keys.h"
#include "bench/machine.h"
#include "bench/numbers.h"
#include "core/check.h"
#include "core/convert.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"

namespace foveal::bench {
namespace {

constexpr std::int64_t kGpuGiB = std::int64_t{1} << 30;

/// The first GPU, in its primary context, on a stream of its own.
class CudaMachine final : public Machine {
 public:
  Device device() const override { return {DeviceType::cuda, 0}; }
  int compute_capability() const override { return properties_.compute_capability; }
  std::string description() const override {
    const int driver = cuda::driver_version();
    const cuda::NvrtcInfo& nvrtc = cuda::nvrtc();
    return fmt::format(
        "{}, {} SMs, {:.0f} GiB, driver for CUDA {}.{}, {}", properties_.name, properties_.sm_count,
        static_cast<double>(properties_.memory_bytes) / kGpuGiB, driver / 1000, driver % 1000 / 10,
        nvrtc.available ? fmt::format("NVRTC {}.{}", nvrtc.major, nvrtc.minor) : "no NVRTC");
  }
  ExecutionContext context() const override { return {.stream = stream_.get()}; }

  std::shared_ptr<void> allocate(std::int64_t bytes) override {
    try {
      auto buffer = std::make_shared<cuda::DeviceBuffer>(0, static_cast<std::size_t>(bytes));
      return {buffer, buffer->data()};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::out_of_memory) {
        throw;
      }
      const auto [free, total] = cuda::memory_info();
      fail(ErrorCode::out_of_memory, "out of memory: {:.1f} GiB wanted, {:.1f} of {:.1f} are free",
           static_cast<double>(bytes) / kGpuGiB, static_cast<double>(free) / kGpuGiB,
           static_cast<double>(total) / kGpuGiB);
    }
  }

  void copy(void* to, const void* from, std::int64_t bytes) override {
    cuda::copy_async(to, from, static_cast<std::size_t>(bytes), stream_.get());
    wait();
  }

  void wait() override { cuda::synchronize(stream_.get()); }

  /// From a graph, so that it is the kernels that are timed and not their launches.
  Times time(const std::function<void()>& body, bool cold_cache) override {
    constexpr double kEnough = 500e3;
    constexpr double kShort = 1000;
    const cuda::Stream stream = stream_.get();
    if (cold_cache && flush_.bytes() == 0) {
      flush_ = cuda::DeviceBuffer(
          0, std::max(std::size_t{256} << 20, static_cast<std::size_t>(4 * properties_.l2_bytes)));
      cuda::fill_async(flush_.data(), 1, flush_.bytes(), stream);
    }
    body();  // Kernels are loaded now, not in the capture.
    wait();
    cuda::Graph graph = cuda::Graph::capture(0, stream, body);
    cuda::Event begin(0);
    cuda::Event end(0);
    const auto replay = [&](bool busy_before) {
      if (cold_cache) {
        // By reading: what is written would have to leave the cache during the measurement.
        sum(flush_.data(), static_cast<std::int64_t>(flush_.bytes()));
      } else if (busy_before) {
        graph.launch(stream);
      }
      begin.record(stream);
      graph.launch(stream);
      end.record(stream);
      return 1000.0 * cuda::Event::elapsed_ms(begin, end);
    };
    // The device must not run dry between the event and the graph: with the cache's flush ahead, or
    // another replay of a short graph, both are in its queue when it gets there.
    const bool busy_before = replay(false) < kShort;
    std::vector<double> times;
    double total = 0;
    while (times.size() < 3 || (times.size() < 100 && total < kEnough)) {
      times.push_back(replay(busy_before));
      total += times.back();
    }
    return summarize(std::move(times));
  }

  double read_bandwidth() override {
    // Far more than L2 holds, so that what stays in it from the replay before hardly counts.
    std::int64_t bytes = 4 * kGpuGiB;
    const auto free = static_cast<std::int64_t>(cuda::memory_info()[0]);
    while (bytes > kGpuGiB && bytes > free / 2) {
      bytes /= 2;
    }
    const std::shared_ptr<void> memory = allocate(bytes);
    const Numbers numbers(DType::f32, 1);
    numbers.fill(*this, memory.get(), bytes);
    const Times times = time([&] { sum(memory.get(), bytes); }, false);
    std::vector<std::uint32_t> sums(sums_.bytes() / sizeof(std::uint32_t));
    copy(sums.data(), sums_.data(), static_cast<std::int64_t>(sums_.bytes()));
    if (std::accumulate(sums.begin(), sums.end(), 0U) != numbers.word_sum(bytes / 4)) {
      fail(ErrorCode::device, "the sum that measures the read bandwidth is wrong");
    }
    return static_cast<double>(bytes) / times.min_us / 1e3;
  }

  /// Of cuBLAS, on matrices so large that reading and writing them hides behind the products.
  ProductRate product_rate(DType dtype) override {
    constexpr std::int64_t kSize = 8192;
    if (dtype != DType::f16 && dtype != DType::bf16) {
      fail(ErrorCode::unsupported, "the rate of products is measured for f16 and bf16, not for {}",
           to_string(dtype));
    }
    const Numbers left(dtype, 1);
    const Numbers right(dtype, 2);
    const std::int64_t bytes = kSize * kSize * size_of(dtype);
    const std::shared_ptr<void> a = allocate(bytes);
    const std::shared_ptr<void> b = allocate(bytes);
    const std::shared_ptr<void> c = allocate(bytes);
    left.fill(*this, a.get(), bytes);
    right.fill(*this, b.get(), bytes);
    const auto matrix = [](const std::shared_ptr<void>& data) {
      return Cublas::Matrix{data.get(), kSize, kSize * kSize};
    };
    const Cublas& library = cublas();
    const Times times = time(
        [&] {
          library.multiply(dtype, kSize, kSize, kSize, 1.0F, matrix(a), matrix(b), true, matrix(c),
                           1);
        },
        false);
    require_product(left, right, dtype, kSize, c.get());
    const auto size = static_cast<double>(kSize);
    return {.tflops = 2.0 * size * size * size / times.min_us / 1e6,
            .how = fmt::format("cuBLAS, {}, {} x {} x {}", to_string(dtype), kSize, kSize, kSize)};
  }

  std::int64_t naive_score_bytes(const NaiveProblem& problem) const override {
    return problem.heads * problem.rows * score_stride(problem) * size_of(problem.dtype);
  }

  void naive(const NaiveProblem& p) override {
    const Cublas& library = cublas();
    const SoftmaxRows softmax = softmax_rows(p.dtype, p.keys, properties_.compute_capability);
    const cuda::Kernel* kernel = cuda::Jit::global().prepare(softmax.key, 0);
    const std::int64_t rows = p.heads * p.rows;
    check(rows <= std::numeric_limits<int>::max(), "naive: there are {} rows of scores, at most {}",
          rows, std::numeric_limits<int>::max());
    const auto matrix = [&](const void* data, std::int64_t length, std::int64_t row) {
      return Cublas::Matrix{const_cast<void*>(data), row, length * row};
    };
    const Cublas::Matrix scores = matrix(p.scores, p.rows, score_stride(p));
    library.multiply(p.dtype, p.rows, p.keys, p.head_size, p.scale,
                     matrix(p.query, p.rows, p.head_size), matrix(p.key, p.keys, p.head_size), true,
                     scores, p.heads);
    const long long stride = score_stride(p);
    cuda::launch(*kernel,
                 {.grid = {static_cast<unsigned>(rows), 1, 1},
                  .block = {static_cast<unsigned>(softmax.threads), 1, 1},
                  .stream = stream_.get()},
                 p.scores, stride, static_cast<int>(p.keys));
    library.multiply(p.dtype, p.rows, p.head_size, p.keys, 1.0F, scores,
                     matrix(p.value, p.keys, p.head_size), false,
                     matrix(p.output, p.rows, p.head_size), p.heads);
  }

 private:
  const Cublas& cublas() {
    if (!cublas_) {
      cublas_ = std::make_unique<Cublas>(stream_.get());
    }
    return *cublas_;
  }

  /// Of left · rightᵀ, the last element of a row in the middle.
  void require_product(const Numbers& left, const Numbers& right, DType dtype, std::int64_t size,
                       const void* product) {
    const std::int64_t row = size / 2;
    double expected = 0;
    double squares = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      const double term = left.at(row * size + i) * right.at((size - 1) * size + i);
      expected += term;
      squares += term * term;
    }
    std::array<std::byte, 8> element{};  // Room for any dtype.
    copy(element.data(),
         static_cast<const std::byte*>(product) + (row * size + size - 1) * size_of(dtype),
         size_of(dtype));
    // In units of what a sum of random terms is: two roundings to bfloat16 are 0.01 of it.
    const double error = std::abs(load_element(element.data(), dtype, 0) - expected);
    if (!(error <= 0.02 * std::max(std::sqrt(squares), std::abs(expected)))) {
      fail(ErrorCode::device, "the product that measures the rate of products is wrong");
    }
  }

  /// Reads all of it; each thread leaves a sum of its own in sums_.
  void sum(const void* data, std::int64_t bytes) {
    constexpr unsigned kThreads = 512;
    const cuda::Kernel* kernel =
        cuda::Jit::global().prepare(read_sum_key(properties_.compute_capability), 0);
    if (sums_.bytes() == 0) {
      const int per_sm = cuda::max_active_blocks_per_sm(kernel->function, kThreads, 0);
      sums_ = cuda::DeviceBuffer(0, static_cast<std::size_t>(properties_.sm_count) *
                                        static_cast<std::size_t>(std::max(per_sm, 1)) * kThreads *
                                        sizeof(std::uint32_t));
    }
    const auto blocks = static_cast<unsigned>(sums_.bytes() / sizeof(std::uint32_t) / kThreads);
    const long long count = bytes / 16;
    cuda::launch(*kernel,
                 {.grid = {blocks, 1, 1}, .block = {kThreads, 1, 1}, .stream = stream_.get()}, data,
                 count, sums_.data());
  }

  /// Rows of scores begin at multiples of 16 bytes.
  static std::int64_t score_stride(const NaiveProblem& problem) {
    return (problem.keys + 7) / 8 * 8;
  }

  cuda::ContextGuard guard_{0};
  const cuda::DeviceProperties& properties_ = cuda::device_properties(0);
  cuda::OwnedStream stream_{0};
  cuda::DeviceBuffer flush_;
  cuda::DeviceBuffer sums_;
  std::unique_ptr<Cublas> cublas_;
};

}  // namespace

std::unique_ptr<Machine> make_cuda_machine() {
  if (!cuda::available()) {
    fail(ErrorCode::device, "device is cuda: {}", cuda::unavailable_reason());
  }
  return std::make_unique<CudaMachine>();
}

}  // namespace foveal::bench
