#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>

#include "bench/cpu_naive.h"
#include "bench/cpu_products.h"
#include "bench/machine.h"
#include "core/check.h"
#include "core/host_memory.h"

namespace foveal::bench {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

class CpuMachine final : public Machine {
 public:
  explicit CpuMachine(int num_threads) : pool_(make_thread_pool(num_threads)) {}

  Device device() const override { return {}; }
  std::string description() const override {
    const std::string name = processor_name();
    return fmt::format("{}, {} threads", name.empty() ? "CPU" : name, pool_->num_threads());
  }
  ExecutionContext context() const override { return {.threads = pool_.get()}; }

  std::shared_ptr<void> allocate(std::int64_t bytes) override {
    // The system would promise more than it has, and end the process when it is used.
    const std::int64_t physical = physical_bytes();
    std::shared_ptr<void> memory = bytes > physical ? nullptr : allocate_host(bytes);
    if (memory == nullptr) {
      fail(ErrorCode::out_of_memory, "out of memory: {:.1f} GiB wanted, the machine has {:.1f}",
           static_cast<double>(bytes) / kGiB, static_cast<double>(physical) / kGiB);
    }
    return memory;
  }

  void copy(void* to, const void* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }

  void wait() override {}

  Times time(const std::function<void()>& body, bool /*cold_cache*/) override {
    constexpr double kEnough = 300e3;
    using Clock = std::chrono::steady_clock;
    body();
    std::vector<double> times;
    double total = 0;
    while (times.size() < 3 || (times.size() < 100 && total < kEnough)) {
      const auto begin = Clock::now();
      body();
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      total += times.back();
    }
    return summarize(std::move(times));
  }

  double read_bandwidth() override {
    constexpr std::int64_t kPieces = 256;
    // More than caches hold, where there is as much.
    const std::int64_t num_words = std::min(2 * kGiB, physical_bytes() / 4) / kPieces / 8;
    const std::int64_t bytes = num_words * kPieces * 8;
    const std::shared_ptr<void> memory = allocate(bytes);
    auto* words = static_cast<std::uint64_t*>(memory.get());
    std::vector<std::uint64_t> sums(kPieces);
    const auto fill = [&](std::int64_t piece, int) {
      std::iota(words + piece * num_words, words + (piece + 1) * num_words,
                static_cast<std::uint64_t>(piece));
    };
    const auto sum = [&](std::int64_t piece, int) {
      sums[static_cast<std::size_t>(piece)] = std::accumulate(
          words + piece * num_words, words + (piece + 1) * num_words, std::uint64_t{0});
    };
    pool_->parallel_for(kPieces, std::ref(fill));
    const Times times = time([&] { pool_->parallel_for(kPieces, std::ref(sum)); }, false);
    // Looking at the sums also keeps the compiler from leaving the reading out.
    for (std::int64_t piece = 0; piece < kPieces; ++piece) {
      const auto first = static_cast<std::uint64_t>(piece);
      const auto count = static_cast<std::uint64_t>(num_words);
      if (sums[static_cast<std::size_t>(piece)] != count * first + count * (count - 1) / 2) {
        fail(ErrorCode::device, "the sum that measures the read bandwidth is wrong");
      }
    }
    return static_cast<double>(bytes) / times.min_us / 1e3;
  }

  ProductRate product_rate(DType dtype) override {
    const CpuProducts products(dtype);
    // Several for each thread, so that one that is held up is helped out.
    const std::int64_t pieces = 8 * static_cast<std::int64_t>(pool_->num_threads());
    const auto run = [&](std::int64_t, int) { products.run(); };
    const Times times = time([&] { pool_->parallel_for(pieces, std::ref(run)); }, false);
    return {.tflops = static_cast<double>(pieces) * products.flops() / times.min_us / 1e6,
            .how = products.name()};
  }

  std::int64_t naive_score_bytes(const NaiveProblem& problem) const override {
    return problem.heads * problem.rows * problem.keys * size_of(problem.dtype);
  }

  void naive(const NaiveProblem& problem) override {
    if (!naive_ || !naive_->fits(problem)) {
      naive_ = std::make_unique<CpuNaive>(problem);
    }
    naive_->run(problem, *pool_);
  }

 private:
  static std::int64_t physical_bytes() {
    return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) *
           static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
  }

  std::shared_ptr<ThreadPool> pool_;
  std::unique_ptr<CpuNaive> naive_;
};

}  // namespace

Times summarize(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  const std::size_t count = microseconds.size();
  return {.median_us = microseconds[count / 2],
          .min_us = microseconds.front(),
          .p90_us = microseconds[count * 9 / 10],
          .count = static_cast<std::int64_t>(count)};
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const std::size_t colon = line.find(": ");
      return colon == std::string::npos ? std::string() : line.substr(colon + 2);
    }
  }
  return {};
}

std::unique_ptr<Machine> make_cpu_machine(int num_threads) {
  return std::make_unique<CpuMachine>(num_threads);
}

}  // namespace foveal::bench
