#pragma once

#include <memory>

#include "bench/machine.h"

namespace foveal::bench {

/// The naive way on the CPU, in float32: oneDNN's matrix product and softmax, a head a task.
class CpuNaive {
 public:
  /// Prepares for problems of this one's sizes.
  explicit CpuNaive(const NaiveProblem& problem);
  ~CpuNaive();
  bool fits(const NaiveProblem& problem) const;
  void run(const NaiveProblem& problem, ThreadPool& threads) const;

 private:
  struct Softmax;
  std::unique_ptr<Softmax> softmax_;
};

}  // namespace foveal::bench
