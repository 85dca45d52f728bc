#include "problem/problem.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <utility>

#include "core/check.h"
#include "core/convert.h"
#include "core/index.h"

namespace foveal::problem {
namespace {

/// Normal numbers from splitmix64 and Box and Muller: the standard library's distributions differ
/// from one implementation to another.
class NormalNumbers {
 public:
  explicit NormalNumbers(std::uint64_t seed) : state_(seed) {}

  double next() {
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  /// In (0, 1].
  double uniform() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    z ^= z >> 31;
    return (static_cast<double>(z >> 11) + 1.0) * 0x1p-53;
  }

  std::uint64_t state_;
};

void check_length(std::string_view name, const std::vector<double>& numbers, std::int64_t length) {
  check(std::ssize(numbers) == length, "{} has {} numbers, it must have {}", name, numbers.size(),
        length);
}

/// What an element of a tensor of `dtype` stands for is element · scale, where it is fp8.
std::vector<double> convert(const std::vector<double>& numbers, DType from, DType to, float scale) {
  std::vector<double> converted;
  converted.reserve(numbers.size());
  for (const double number : numbers) {
    converted.push_back(round_to(to, number * scale_in(from, scale) / scale_in(to, scale)));
  }
  return converted;
}

}  // namespace

double scale_in(DType dtype, float scale) {
  return is_fp8(dtype) ? static_cast<double>(scale) : 1.0;
}

double round_to(DType dtype, double value) {
  std::uint64_t bits = 0;
  store_element(&bits, dtype, 0, value);
  return load_element(&bits, dtype, 0);
}

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-53;
    case DType::f32:
      return 0x1p-24;
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    case DType::f8e4m3:
      return 0x1p-4;
    case DType::f8e5m2:
      return 0x1p-3;
    default:
      return 0.0;
  }
}

double half_subnormal(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0x1p-150;
    case DType::bf16:
      return 0x1p-134;
    case DType::f16:
      return 0x1p-25;
    default:
      return 0.0;
  }
}

std::int64_t AttentionProblem::owned_rows() const { return query_start(std::ssize(requests)); }

std::int64_t AttentionProblem::keys() const { return key_start(std::ssize(requests)); }

std::int64_t AttentionProblem::query_start(std::int64_t request) const {
  std::int64_t start = 0;
  for (std::int64_t r = 0; r < request; ++r) {
    start += requests[at(r)].q_len;
  }
  return start;
}

std::int64_t AttentionProblem::key_start(std::int64_t request) const {
  std::int64_t start = 0;
  for (std::int64_t r = 0; r < request; ++r) {
    start += requests[at(r)].kv_len;
  }
  return start;
}

DType AttentionProblem::output_dtype() const {
  return is_fp8(spec.dtype) ? DType::bf16 : spec.dtype;
}

void AttentionProblem::allocate() {
  query.assign(at(rows() * spec.num_heads * spec.head_size), 0.0);
  key.assign(at(keys() * spec.num_kv_heads * spec.head_size), 0.0);
  value.assign(at(keys() * spec.num_kv_heads * spec.value_head_size()), 0.0);
  stored_key = key;
  stored_value = value;
}

void AttentionProblem::fill_random(std::uint64_t seed) {
  allocate();
  const auto fill = [&](std::vector<double>& numbers, std::uint64_t stream, float scale) {
    NormalNumbers normal(seed * 3 + stream);
    for (double& number : numbers) {
      number = round_to(spec.dtype, normal.next() / scale_in(spec.dtype, scale));
    }
  };
  fill(query, 0, spec.scales.q);
  fill(key, 1, spec.scales.k);
  fill(value, 2, spec.scales.v);
  for (std::vector<double>* tokens : {&key, &value}) {
    const std::int64_t width =
        spec.num_kv_heads * (tokens == &key ? spec.head_size : spec.value_head_size());
    for (std::int64_t r = 1; r < std::ssize(requests); ++r) {
      std::copy_n(tokens->begin(), common_prefix_len * width,
                  tokens->begin() + key_start(r) * width);
    }
  }
  quantize();
}

void AttentionProblem::quantize() {
  stored_key = convert(key, spec.dtype, spec.cache_dtype(), spec.scales.k);
  stored_value = convert(value, spec.dtype, spec.cache_dtype(), spec.scales.v);
}

void AttentionProblem::dequantize() {
  // Every dtype a query has is finer than those of quantised caches, so the way back finds the same
  // number.
  key = convert(stored_key, spec.cache_dtype(), spec.dtype, spec.scales.k);
  value = convert(stored_value, spec.cache_dtype(), spec.dtype, spec.scales.v);
}

void AttentionProblem::set_mask(std::vector<std::uint8_t> bits) {
  struct Mask {
    std::vector<std::uint8_t> bits;
    std::vector<Request> requests;
    std::vector<std::int64_t> starts;
  };
  auto shared = std::make_shared<Mask>();
  std::int64_t length = 0;
  for (const Request& request : requests) {
    shared->starts.push_back(length);
    length += request.q_len * request.kv_len;
  }
  check(std::ssize(bits) == length,
        "mask has {} entries, it must have {}: q_len x kv_len of each request", bits.size(),
        length);
  mask = bits;
  shared->bits = std::move(bits);
  shared->requests = requests;
  spec.mask_mod = [shared = std::move(shared)](const ScoreIndex& index) {
    // A backend may ask for keys of a tile that reaches past the request's.
    if (index.request < 0 || index.request >= std::ssize(shared->requests)) {
      return false;
    }
    const Request& request = shared->requests[at(index.request)];
    if (index.query_row < 0 || index.query_row >= request.q_len || index.key_position < 0 ||
        index.key_position >= request.kv_len) {
      return false;
    }
    return shared->bits[at(shared->starts[at(index.request)] + index.query_row * request.kv_len +
                           index.key_position)] != 0;
  };
}

void AttentionProblem::validate() const {
  spec.validate();
  check(!spec.mla, "spec.mla is set, a problem is of a layer that is not MLA");
  check(block_size > 0, "block_size is {}, it must be positive", block_size);
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const auto& [q_len, kv_len] = requests[r];
    check(q_len >= 0 && kv_len >= 0, "requests[{}] has q_len {} and kv_len {}, both must be >= 0",
          r, q_len, kv_len);
    check(q_len == 0 || common_prefix_len <= std::max<std::int64_t>(kv_len - q_len, 0),
          "common_prefix_len is {}, it may be at most the context of every request; request {} "
          "has {}",
          common_prefix_len, r, kv_len - q_len);
  }
  check(common_prefix_len >= 0 && common_prefix_len % block_size == 0,
        "common_prefix_len is {}, it must be a multiple of block_size = {}", common_prefix_len,
        block_size);
  check(paged || common_prefix_len == 0, "common_prefix_len is {}, it must be 0 without a cache",
        common_prefix_len);
  check(!paged || spec.uses_cache(), "paged is true, attn_type {} has no cache",
        to_string(spec.attn_type));
  check(padded_requests >= 0 && unowned_rows >= 0,
        "padded_requests is {} and unowned_rows {}, both must be >= 0", padded_requests,
        unowned_rows);
  check_length("query", query, rows() * spec.num_heads * spec.head_size);
  check_length("key", key, keys() * spec.num_kv_heads * spec.head_size);
  check_length("value", value, keys() * spec.num_kv_heads * spec.value_head_size());
  check_length("stored_key", stored_key, std::ssize(key));
  check_length("stored_value", stored_value, std::ssize(value));
  if (expected_output) {
    check_length("expected_output", *expected_output,
                 rows() * spec.num_heads * spec.value_head_size());
  }
  if (expected_lse) {
    check_length("expected_lse", *expected_lse, rows() * spec.num_heads);
  }
}

AttentionProblem with_dtype(const AttentionProblem& problem, DType dtype) {
  check(is_float(dtype), "dtype is {}, it must be a floating type", to_string(dtype));
  AttentionProblem other = problem;
  const DType from = problem.spec.dtype;
  if (from == dtype) {
    return other;
  }
  const bool cache_stays =
      problem.spec.kv_cache_dtype.has_value() && is_fp8(*problem.spec.kv_cache_dtype);
  other.spec.dtype = dtype;
  other.query = convert(problem.query, from, dtype, problem.spec.scales.q);
  if (cache_stays) {
    other.dequantize();
  } else {
    other.spec.kv_cache_dtype.reset();
    other.key = convert(problem.key, from, dtype, problem.spec.scales.k);
    other.value = convert(problem.value, from, dtype, problem.spec.scales.v);
    other.quantize();
  }
  other.inputs_rounded = problem.inputs_rounded || other.query != problem.query ||
                         other.key != problem.key || other.value != problem.value;
  return other;
}

}  // namespace foveal::problem
