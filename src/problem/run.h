#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/backend.h"
#include "problem/problem.h"

namespace foveal::problem {

/// How the paged cache lies in memory.
enum class CacheStyle : std::uint8_t {
  nhd,       ///< The backend's own layout, tokens outside heads.
  hnd,       ///< The backend's own layout, heads outside tokens.
  kv_first,  ///< [2, num_blocks, block_size, num_kv_heads, head_size]
  packed,    ///< [num_blocks, num_kv_heads, block_size, head_size + head_size_v]
  padded,    ///< K and V of a block side by side, with gaps behind heads, tokens and blocks.
};

/// The memory around a problem, none of which may change the result.
struct RunOptions {
  CacheStyle cache = CacheStyle::nhd;
  /// This step's keys are written by update_kv_cache; otherwise they stand in the cache already.
  bool update_cache = true;
  /// 0: the problem's block size where the backend takes it, else the largest part of it that it
  /// takes.
  std::int64_t kernel_block_size = 0;
  std::int64_t num_splits = 0;  ///< As in BuilderConfig.
  int num_threads = 0;          ///< Likewise.
  bool batch_invariant = false;
  bool cascade = true;           ///< Off: a common prefix is shared, but not made known.
  std::int64_t padded_rows = 0;  ///< Rows of the tensors past num_actual_tokens.
  std::int64_t row_gap = 0;  ///< Unused elements between two rows of query, key, value and output.
  bool want_lse = true;
  /// What unused slots, blocks, rows and gaps hold.
  double poison = std::numeric_limits<double>::quiet_NaN();
  std::uint64_t seed = 1;  ///< Of the order of the blocks in the pool.
  ThreadPool* threads = nullptr;
};

struct RunResult {
  std::string backend;
  std::vector<double> output;  ///< [rows, num_heads, head_size_v]
  std::vector<double> lse;     ///< [num_heads, rows]; empty when not wanted.
  /// What was overwritten that must not be: inputs, padding, gaps, memory around the tensors, slots
  /// of the cache. And what update_kv_cache wrote into the cache, where it is not what it should
  /// be.
  std::vector<std::string> damage;
};

/// What choosing a backend for the problem depends on. An empty id is automatic.
SelectorConfig selector_config(const AttentionProblem& problem, std::string_view id = {});
/// Throws unsupported, with the selector's reasons, when none can serve it.
AttentionBackendPtr choose_backend(const AttentionProblem& problem, std::string_view id = {});

/// Lays the problem out, runs update_kv_cache and forward, and collects what came out. Runs
/// backends of the CPU. Throws what they throw.
RunResult run_problem(const AttentionProblem& problem, const AttentionBackend& backend,
                      const RunOptions& options = {});

}  // namespace foveal::problem
