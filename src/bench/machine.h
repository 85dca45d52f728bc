#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "foveal/execution.h"

namespace foveal::bench {

/// Of one call, over several.
struct Times {
  double median_us = 0;
  double min_us = 0;
  double p90_us = 0;
  std::int64_t count = 0;
};

Times summarize(std::vector<double> microseconds);

/// How fast a machine multiplies and adds.
struct ProductRate {
  double tflops = 0;
  std::string how{};  ///< With which instructions, or whose product; for people.
};

/// Attention written down: scores = scale · query · keyᵀ, a softmax of each row, probabilities ·
/// value. Without a mask. Every head of every request is a problem of its own, and theirs lie one
/// behind the other: query and output [heads, rows, head_size], key and value [heads, keys,
/// head_size].
struct NaiveProblem {
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t keys = 0;
  std::int64_t head_size = 0;
  float scale = 1.0F;
  DType dtype = DType::bf16;
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  void* output = nullptr;
  void* scores = nullptr;  ///< naive_score_bytes() of scratch.
};

/// Where things are timed.
class Machine {
 public:
  Machine() = default;
  virtual ~Machine() = default;
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  virtual Device device() const = 0;
  /// CUDA: 10·major + minor.
  virtual int compute_capability() const { return 0; }
  /// For people: the processor's name and what of it is used.
  virtual std::string description() const = 0;
  /// How work is given to it.
  virtual ExecutionContext context() const = 0;

  /// Throws out_of_memory, saying how much was wanted.
  virtual std::shared_ptr<void> allocate(std::int64_t bytes) = 0;
  /// To or from the machine, or within it. Done when it returns.
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;
  /// For all that was begun.
  virtual void wait() = 0;

  /// What `body` takes, the first call aside. With `cold_cache` a GPU's L2 cache is overwritten
  /// before each; the CPU's caches are left as they are.
  virtual Times time(const std::function<void()>& body, bool cold_cache) = 0;
  // Ceilings, measured: the fastest repeat, as nothing is to be faster.
  /// A plain sum over much more memory than caches hold. In GB/s.
  virtual double read_bandwidth() = 0;
  /// Products of this dtype. Throws unsupported where this machine
  /// lacks what it takes to tell.
  virtual ProductRate product_rate(DType dtype) = 0;

  virtual std::int64_t naive_score_bytes(const NaiveProblem& problem) const = 0;
  /// Throws unsupported where this machine lacks what it takes.
  virtual void naive(const NaiveProblem& problem) = 0;
};

/// `num_threads` 0: as many as the machine has.
std::unique_ptr<Machine> make_cpu_machine(int num_threads);
/// Throws device when there is no GPU, unsupported in a build without CUDA.
std::unique_ptr<Machine> make_cuda_machine();

/// The processor's name as the system gives it; empty where it does not.
std::string processor_name();

}  // namespace foveal::bench
