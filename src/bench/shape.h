#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/spec.h"

namespace foveal::bench {

/// What is timed.
enum class Kind : std::uint8_t {
  prefill,      ///< All keys are of this step.
  chunked,      ///< The last queries of longer requests.
  decode,       ///< One query a request.
  mixed,        ///< Decodes, and behind them chunks of prompts, in one step.
  cascade,      ///< Decodes that share a long prefix, beside the same step without cascade.
  mla,          ///< DeepSeek's layers: prompts on decompressed keys, decodes on the latent cache.
  cache_write,  ///< New keys and values into the paged cache.
  naive,        ///< Matrix product, softmax, matrix product, beside attention on the same shape.
};

/// "prefill", "chunked", "decode", "mixed", "cascade", "mla", "cache-write", "naive".
std::string_view to_string(Kind kind);
std::optional<Kind> kind_from_string(std::string_view name);
/// All their names, for messages.
std::string kind_names();

/// One step of one layer: `batch` requests with the same number of keys.
struct Shape {
  Kind kind = Kind::prefill;
  std::int64_t batch = 1;
  std::int64_t q_len = 1;       ///< Queries a request; cache_write: new tokens.
  std::int64_t kv_len = 1;      ///< Keys a request, those of this step included.
  std::int64_t decodes = 0;     ///< mixed: so many requests, the first, have one query.
  std::int64_t prefix_len = 0;  ///< cascade: leading keys that all requests share.
  std::int64_t num_heads = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t head_size = 128;
  std::int64_t head_size_v = 0;  ///< Of values and output; 0: head_size.
  bool causal = true;
  std::int64_t block_size = 16;  ///< Of the paged cache; 0: keys and values are plain tensors.
  DType dtype = DType::bf16;
  DType kv_cache_dtype = DType::bf16;

  std::int64_t value_size() const { return head_size_v == 0 ? head_size : head_size_v; }
  DType output_dtype() const { return is_fp8(dtype) ? DType::bf16 : dtype; }
  std::int64_t queries(std::int64_t request) const { return request < decodes ? 1 : q_len; }
  std::int64_t tokens() const { return decodes + (batch - decodes) * q_len; }
  /// mla on the latent cache, where the values are the beginning of the keys.
  bool latent() const { return kind == Kind::mla && block_size > 0; }
  /// The step is nothing but decodes.
  bool decodes_only() const { return kind == Kind::decode || kind == Kind::cascade || latent(); }
  AttentionSpec spec() const;
  /// Two products of a multiply and an add, of every query with every key it sees, in every head. A
  /// cache write has none.
  double flops() const;
  /// Of all requests' keys and values, a shared prefix once: what a decode step must read.
  double kv_bytes() const;
  /// What the step must move at the least: queries, keys and values read once, outputs written. Of
  /// a cache write: what is read and written.
  double least_bytes() const;
  /// "decode 8 x 8192, 32/8 heads of 128, …": for messages.
  std::string text() const;
};

/// Pairs of a row and a key it sees, in one request: row i stands at position kv_len − q_len + i
/// and sees the keys of the window around it. Causal is a window with nothing on the right.
std::int64_t visible_pairs(std::int64_t q_len, std::int64_t kv_len, const Window& window);

/// What the shapes are made of; members left empty take the values of the device's table.
struct ShapeOptions {
  std::vector<Kind> kinds{};  ///< Empty: all that the other members allow.
  DeviceType device = DeviceType::cpu;
  std::optional<std::int64_t> num_heads{};
  std::optional<std::int64_t> num_kv_heads{};  ///< By default num_heads, where that is given.
  std::optional<std::int64_t> head_size{};
  std::optional<std::int64_t> block_size{};  ///< 0: plain keys and values.
  /// Given either, each batch is combined with each length, and the table's sizes are left out.
  std::vector<std::int64_t> batch{};
  std::vector<std::int64_t> seq_len{};
  std::optional<DType> dtype{};  ///< By default bf16 on a GPU, f32 on the CPU.
  std::optional<DType> kv_cache_dtype{};
};

/// Throws invalid_argument, naming the member, for a value out of range or one that contradicts a
/// kind that was asked for by name.
std::vector<Shape> make_shapes(const ShapeOptions& options);

}  // namespace foveal::bench
