#include "bench/shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "core/check.h"

namespace foveal::bench {
namespace {

constexpr std::array<Kind, 5> kKinds{Kind::prefill, Kind::chunked, Kind::decode, Kind::cache_write,
                                     Kind::naive};
constexpr std::int64_t kBlockSize = 16;
/// Positions and starts are int32.
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

struct Size {
  std::int64_t batch;
  std::int64_t q_len;
  std::int64_t kv_len;
};

/// The sizes that are run where the user gives none.
struct Table {
  std::int64_t prefill_width;  ///< Heads · head size of prefill and naive.
  std::int64_t num_heads;      ///< Of the others.
  std::int64_t num_kv_heads;
  std::int64_t chunk;
  std::vector<Size> prefill, chunked, decode, cache_write, naive;

  const std::vector<Size>& sizes(Kind kind) const {
    switch (kind) {
      case Kind::prefill:
        return prefill;
      case Kind::chunked:
        return chunked;
      case Kind::decode:
        return decode;
      case Kind::cache_write:
        return cache_write;
      case Kind::naive:
        break;
    }
    return naive;
  }
};

Size whole(std::int64_t batch, std::int64_t len) { return {batch, len, len}; }

const Table& table_for(DeviceType device) {
  static const Table gpu{.prefill_width = 2048,
                         .num_heads = 32,
                         .num_kv_heads = 8,
                         .chunk = 512,
                         .prefill = {whole(4, 4096), whole(1, 16384)},
                         .chunked = {{8, 512, 8704}, {1, 2048, 34816}},
                         .decode = {{1, 1, 8192},
                                    {8, 1, 8192},
                                    {1, 1, 131072},
                                    {32, 1, 8192},
                                    {128, 1, 1024},
                                    {128, 1, 8192}},
                         .cache_write = {whole(1, 8192)},
                         .naive = {whole(1, 2048), whole(1, 8192), whole(1, 32768), whole(64, 2048),
                                   whole(64, 8192), whole(64, 32768)}};
  // Two cores go through these in about half a minute.
  static const Table cpu{.prefill_width = 1024,
                         .num_heads = 32,
                         .num_kv_heads = 8,
                         .chunk = 128,
                         .prefill = {whole(4, 512), whole(1, 2048)},
                         .chunked = {{4, 128, 2176}},
                         .decode = {{1, 1, 4096}, {8, 1, 4096}, {1, 1, 32768}, {32, 1, 1024}},
                         .cache_write = {whole(1, 8192)},
                         .naive = {whole(1, 512), whole(1, 2048), whole(16, 512)}};
  return device == DeviceType::cpu ? cpu : gpu;
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  check(value >= low && value <= high, "{} is {}, it must be in [{}, {}]", name, value, low, high);
}

void check_options(const ShapeOptions& options) {
  // Small enough that no product of them leaves 64 bits.
  constexpr std::int64_t kMaxHeads = 4096;
  constexpr std::int64_t kMaxHeadSize = 4096;
  if (options.num_heads) {
    check_range("num_heads", *options.num_heads, 1, kMaxHeads);
  }
  if (options.num_kv_heads) {
    check_range("num_kv_heads", *options.num_kv_heads, 1, kMaxHeads);
  }
  if (options.head_size) {
    check_range("head_size", *options.head_size, 1, kMaxHeadSize);
  }
  if (options.block_size) {
    check_range("block_size", *options.block_size, 0, 1 << 20);
  }
  for (const std::int64_t batch : options.batch) {
    check_range("batch", batch, 1, kMaxTokens);
  }
  for (const std::int64_t len : options.seq_len) {
    check_range("seq_len", len, 1, kMaxTokens);
  }
  if (options.dtype) {
    check(*options.dtype == DType::f32 || *options.dtype == DType::f16 ||
              *options.dtype == DType::bf16 || *options.dtype == DType::f8e4m3,
          "dtype is {}, accepted are f32, f16, bf16, f8e4m3", to_string(*options.dtype));
  }
}

/// Why the options leave nothing of this kind to run; empty when they do not.
std::string contradiction(Kind kind, const ShapeOptions& options, DType dtype) {
  if (kind == Kind::cache_write && options.block_size == 0) {
    return "block_size is 0 (plain keys and values), cache-write needs a paged cache";
  }
  if (kind != Kind::naive) {
    return options.block_size.value_or(1) == 0 && options.kv_cache_dtype.value_or(dtype) != dtype
               ? fmt::format(
                     "block_size is 0 (plain keys and values, which have the dtype), "
                     "kv_cache_dtype is {}",
                     to_string(*options.kv_cache_dtype))
               : std::string();
  }
  if (options.block_size.value_or(0) != 0) {
    return fmt::format("block_size is {}, naive takes plain keys and values: 0",
                       *options.block_size);
  }
  if (options.kv_cache_dtype.value_or(dtype) != dtype) {
    return fmt::format("kv_cache_dtype is {}, naive has no cache",
                       to_string(*options.kv_cache_dtype));
  }
  if (options.num_kv_heads && options.num_kv_heads != options.num_heads) {
    return fmt::format("num_kv_heads is {}, naive needs as many as num_heads",
                       *options.num_kv_heads);
  }
  if (options.device == DeviceType::cpu && dtype != DType::f32) {
    return fmt::format("dtype is {}, naive on the CPU takes f32", to_string(dtype));
  }
  if (is_fp8(dtype)) {
    return fmt::format("dtype is {}, naive takes f16 and bf16", to_string(dtype));
  }
  return {};
}

std::vector<Size> sizes_of(Kind kind, const ShapeOptions& options, const Table& table) {
  const std::vector<Size>& usual = table.sizes(kind);
  if (options.batch.empty() && options.seq_len.empty()) {
    return usual;
  }
  std::vector<Size> sizes;
  for (const std::int64_t batch :
       options.batch.empty() ? std::vector<std::int64_t>{1} : options.batch) {
    for (const std::int64_t len : options.seq_len.empty()
                                      ? std::vector<std::int64_t>{usual.front().kv_len}
                                      : options.seq_len) {
      const std::int64_t queries = kind == Kind::decode    ? 1
                                   : kind == Kind::chunked ? std::min(table.chunk, len)
                                                           : len;
      sizes.push_back({batch, queries, len});
    }
  }
  return sizes;
}

}  // namespace

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::prefill:
      return "prefill";
    case Kind::chunked:
      return "chunked";
    case Kind::decode:
      return "decode";
    case Kind::cache_write:
      return "cache-write";
    case Kind::naive:
      break;
  }
  return "naive";
}

std::optional<Kind> kind_from_string(std::string_view name) {
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](Kind kind) { return to_string(kind) == name; });
  return found == kKinds.end() ? std::nullopt : std::optional(*found);
}

AttentionSpec Shape::spec() const {
  AttentionSpec spec;
  spec.num_heads = num_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_size = head_size;
  spec.dtype = dtype;
  spec.kv_cache_dtype = kv_cache_dtype;
  return spec;
}

std::int64_t visible_pairs(std::int64_t q_len, std::int64_t kv_len, const Window& window) {
  std::int64_t pairs = 0;
  for (std::int64_t row = 0; row < q_len; ++row) {
    const std::int64_t position = kv_len - q_len + row;
    const std::int64_t first =
        window.left < 0 ? 0 : std::max<std::int64_t>(0, position - window.left);
    const std::int64_t last =
        window.right < 0 ? kv_len - 1 : std::min(kv_len - 1, position + window.right);
    pairs += std::max<std::int64_t>(0, last - first + 1);
  }
  return pairs;
}

double Shape::flops() const {
  const std::int64_t pairs = visible_pairs(q_len, kv_len, {-1, causal ? 0 : -1});
  return 4.0 * static_cast<double>(batch * num_heads * head_size) * static_cast<double>(pairs);
}

double Shape::kv_bytes() const {
  return 2.0 * static_cast<double>(batch * kv_len) *
         static_cast<double>(num_kv_heads * head_size * size_of(kv_cache_dtype));
}

double Shape::write_bytes() const {
  return 2.0 * static_cast<double>(tokens() * num_kv_heads) *
         static_cast<double>(head_size * (size_of(dtype) + size_of(kv_cache_dtype)));
}

std::string Shape::text() const {
  const std::string lengths = q_len == kv_len ? fmt::format("{} x {}", batch, kv_len)
                                              : fmt::format("{} x {} of {}", batch, q_len, kv_len);
  return fmt::format("{} {}, {}/{} heads of {}, {}{}", to_string(kind), lengths, num_heads,
                     num_kv_heads, head_size, causal ? "causal" : "full",
                     block_size == 0 ? ", plain" : fmt::format(", blocks of {}", block_size));
}

std::vector<Shape> make_shapes(const ShapeOptions& options) {
  check_options(options);
  const Table& table = table_for(options.device);
  const DType dtype =
      options.dtype.value_or(options.device == DeviceType::cpu ? DType::f32 : DType::bf16);
  std::vector<Shape> shapes;
  for (const Kind kind : kKinds) {
    const bool asked_for =
        std::find(options.kinds.begin(), options.kinds.end(), kind) != options.kinds.end();
    const std::string reason = contradiction(kind, options, dtype);
    check(!asked_for || reason.empty(), "{}", reason);
    if ((!options.kinds.empty() && !asked_for) || !reason.empty()) {
      continue;
    }
    const bool wide = kind == Kind::prefill || kind == Kind::naive;
    // Whole prompts are compared with plain tensors by others; the rest is about the cache.
    const bool plain = kind == Kind::naive ||
                       (options.block_size ? *options.block_size == 0
                                           : kind == Kind::prefill && !options.kv_cache_dtype);
    std::vector<std::int64_t> head_sizes{options.head_size.value_or(128)};
    if (kind == Kind::prefill && !options.head_size) {
      head_sizes = {64, 128, 256};
    }
    for (const std::int64_t head_size : head_sizes) {
      Shape shape;
      shape.kind = kind;
      shape.head_size = head_size;
      shape.num_heads =
          wide ? std::max<std::int64_t>(1, table.prefill_width / head_size) : table.num_heads;
      shape.num_kv_heads = wide ? shape.num_heads : table.num_kv_heads;
      if (options.num_heads) {
        shape.num_heads = *options.num_heads;
        shape.num_kv_heads = shape.num_heads;
      }
      shape.num_kv_heads = options.num_kv_heads.value_or(shape.num_kv_heads);
      shape.block_size = plain ? 0 : options.block_size.value_or(kBlockSize);
      shape.dtype = dtype;
      shape.kv_cache_dtype = plain ? dtype : options.kv_cache_dtype.value_or(dtype);
      shape.spec().validate();
      const std::vector<Size> sizes = sizes_of(kind, options, table);
      for (const Size& size : sizes) {
        check(size.batch <= kMaxTokens / size.kv_len,
              "batch is {} with a seq_len of {}, together they may have at most {} tokens",
              size.batch, size.kv_len, kMaxTokens);
        shape.batch = size.batch;
        shape.q_len = size.q_len;
        shape.kv_len = size.kv_len;
        shape.causal = !wide;
        shapes.push_back(shape);
        if (kind != Kind::prefill) {
          continue;
        }
        shape.causal = true;
        shapes.push_back(shape);
        if (plain && !options.block_size && &size == &sizes.front()) {
          // What the cache costs against plain tensors.
          shapes.push_back(shape);
          shapes.back().block_size = kBlockSize;
        }
      }
    }
  }
  check(!shapes.empty(), "kinds: the other options leave nothing to run");
  return shapes;
}

}  // namespace foveal::bench
