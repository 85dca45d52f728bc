#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foveal/spec.h"

namespace foveal::problem {

/// Wrong numbers of one kind that are described; the rest are counted.
inline constexpr std::size_t kMaxMessages = 4;

struct Request {
  std::int64_t q_len = 0;
  std::int64_t kv_len =
      0;  ///< All keys, those of this step included. Cross attention: the encoder's.
};

/// One step of one layer with all its numbers: the mathematical problem, without a memory layout
/// (see RunOptions). Numbers are doubles that the tensor's dtype represents exactly; no scale is
/// applied to them.
struct AttentionProblem {
  std::string name = "problem";
  AttentionSpec spec;
  bool causal = true;
  std::vector<Request> requests;
  /// Keys come from a paged cache; otherwise they are plain tensors. Encoders are always plain.
  bool paged = true;
  std::int64_t block_size = 16;
  /// Leading keys that all requests share in the same blocks, a multiple of block_size; run as a
  /// cascade.
  std::int64_t common_prefix_len = 0;
  std::int64_t padded_requests = 0;  ///< Requests of length 0 behind the others.
  std::int64_t unowned_rows = 0;  ///< Rows behind all requests' that are among num_actual_tokens.
  /// Blocks of each request, and how many the pool has; empty and 0: shuffled ones.
  std::vector<std::vector<std::int64_t>> block_ids;
  std::int64_t num_blocks = 0;

  std::vector<double> query;  ///< [rows, num_heads, head_size] in spec.dtype.
  /// [keys, num_kv_heads, head size] in spec.dtype, the requests' keys one behind the other: what
  /// update_kv_cache is given.
  std::vector<double> key;
  std::vector<double> value;
  /// The same as a paged cache holds them, in its dtype.
  std::vector<double> stored_key;
  std::vector<double> stored_value;

  /// What a file expects: [rows, num_heads, head_size_v] and [num_heads, rows].
  std::optional<std::vector<double>> expected_output;
  std::optional<std::vector<double>> expected_lse;
  /// The expectation was computed from numbers that were rounded to spec.dtype afterwards.
  bool inputs_rounded = false;

  /// 0 or 1 for each row and key: q_len · kv_len numbers of each request, one request behind the
  /// other. Kept beside the spec.mask_mod that it became.
  std::vector<std::uint8_t> mask;

  std::int64_t owned_rows() const;  ///< Query rows of the requests.
  std::int64_t rows() const { return owned_rows() + unowned_rows; }
  std::int64_t keys() const;
  std::int64_t query_start(std::int64_t request) const;
  std::int64_t key_start(std::int64_t request) const;
  /// Of the output: spec.dtype; bf16 where the query is fp8.
  DType output_dtype() const;

  /// Makes the tensors as large as the members above ask for, all zero.
  void allocate();
  /// Normally distributed numbers, the same on every machine; keys and values differ. Requests
  /// share the common prefix.
  void fill_random(std::uint64_t seed);
  /// stored_key and stored_value from key and value, as a cache write makes them.
  void quantize();
  /// key and value such that a cache write makes stored_key and stored_value of them.
  void dequantize();
  /// Sets mask and spec.mask_mod. Throws invalid_argument for a wrong length.
  void set_mask(std::vector<std::uint8_t> bits);
  /// Throws invalid_argument naming the first member that contradicts another.
  void validate() const;
};

/// The same problem in another dtype. Numbers are rounded; an fp8 cache stays as it is.
AttentionProblem with_dtype(const AttentionProblem& problem, DType dtype);

/// What a stored number of the dtype is multiplied with: fp8 alone has scales.
double scale_in(DType dtype, float scale);
/// The nearest number of the dtype.
double round_to(DType dtype, double value);
/// Unit roundoff: half the distance from 1 to the next number.
double unit_roundoff(DType dtype);
/// Half the distance between two subnormal numbers: the rounding error near zero.
double half_subnormal(DType dtype);

}  // namespace foveal::problem
