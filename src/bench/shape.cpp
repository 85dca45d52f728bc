#include "bench/shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"

namespace foveal::bench {
namespace {

constexpr std::array<Kind, 8> kKinds{Kind::prefill, Kind::chunked, Kind::decode,      Kind::mixed,
                                     Kind::cascade, Kind::mla,     Kind::cache_write, Kind::naive};
constexpr std::int64_t kBlockSize = 16;
/// Positions and starts are int32.
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

struct Size {
  std::int64_t batch;
  std::int64_t q_len;
  std::int64_t kv_len;
  std::int64_t decodes = 0;
  std::int64_t prefix_len = 0;
};

Size whole(std::int64_t batch, std::int64_t len) { return {batch, len, len}; }

Size chunks_behind(std::int64_t decodes, std::int64_t chunks, std::int64_t queries,
                   std::int64_t keys) {
  return {decodes + chunks, queries, keys, decodes};
}

Size sharing(std::int64_t batch, std::int64_t prefix, std::int64_t keys) {
  return {batch, 1, keys, 0, prefix};
}

/// The sizes that are run where the user gives none.
struct Table {
  std::int64_t prefill_width;  ///< Heads · head size of prefill and naive.
  std::int64_t num_heads;      ///< Of the others.
  std::int64_t num_kv_heads;
  std::int64_t mla_heads;
  std::int64_t chunk;
  std::vector<Size> prefill, chunked, decode, mixed, cascade, mla, cache_write, naive;

  const std::vector<Size>& sizes(Kind kind) const {
    switch (kind) {
      case Kind::prefill:
        return prefill;
      case Kind::chunked:
        return chunked;
      case Kind::decode:
        return decode;
      case Kind::mixed:
        return mixed;
      case Kind::cascade:
        return cascade;
      case Kind::mla:
        return mla;
      case Kind::cache_write:
        return cache_write;
      case Kind::naive:
        break;
    }
    return naive;
  }
};

const Table& table_for(DeviceType device) {
  static const Table gpu{
      .prefill_width = 2048,
      .num_heads = 32,
      .num_kv_heads = 8,
      .mla_heads = 128,
      .chunk = 512,
      .prefill = {whole(4, 4096), whole(1, 16384)},
      .chunked = {{8, 512, 8704}, {1, 2048, 34816}},
      .decode = {{1, 1, 8192},
                 {8, 1, 8192},
                 {1, 1, 131072},
                 {32, 1, 8192},
                 {128, 1, 1024},
                 {128, 1, 8192}},
      .mixed = {chunks_behind(32, 1, 512, 8192), chunks_behind(128, 2, 1024, 4096)},
      .cascade = {sharing(32, 8192, 8448), sharing(128, 8192, 8448), sharing(128, 32768, 33024)},
      .mla = {whole(1, 4096), {1, 1, 8192}, {32, 1, 8192}, {128, 1, 4096}},
      .cache_write = {whole(1, 8192)},
      .naive = {whole(1, 2048), whole(1, 8192), whole(1, 32768), whole(64, 2048), whole(64, 8192),
                whole(64, 32768)}};
  // Two cores go through these in about half a minute.
  static const Table cpu{
      .prefill_width = 1024,
      .num_heads = 32,
      .num_kv_heads = 8,
      .mla_heads = 16,
      .chunk = 128,
      .prefill = {whole(4, 512), whole(1, 2048)},
      .chunked = {{4, 128, 2176}},
      .decode = {{1, 1, 4096}, {8, 1, 4096}, {1, 1, 32768}, {32, 1, 1024}},
      .mixed = {chunks_behind(8, 1, 128, 2048), chunks_behind(16, 2, 128, 1024)},
      .cascade = {sharing(8, 4096, 4352), sharing(32, 2048, 2176)},
      .mla = {whole(1, 512), {1, 1, 4096}, {8, 1, 4096}},
      .cache_write = {whole(1, 8192)},
      .naive = {whole(1, 512), whole(1, 1024), whole(1, 2048), whole(1, 4096), whole(16, 512)}};
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

/// Of the lengths that the user gives, cascade shares seven eighths, in whole blocks.
std::int64_t shared_prefix(std::int64_t len, std::int64_t block_size) {
  return len * 7 / 8 / block_size * block_size;
}

/// Why the options leave nothing of this kind to run; empty when they do not.
std::string contradiction(Kind kind, const ShapeOptions& options, DType dtype) {
  const bool cache_only = kind == Kind::cache_write || kind == Kind::cascade || kind == Kind::mla;
  if (cache_only && options.block_size == 0) {
    return fmt::format("block_size is 0 (plain keys and values), {} needs a paged cache",
                       to_string(kind));
  }
  const std::int64_t block_size = options.block_size.value_or(kBlockSize);
  for (const std::int64_t len : options.seq_len) {
    if (kind == Kind::cascade && shared_prefix(len, block_size) == 0) {
      return fmt::format("seq_len is {}, cascade shares seven eighths of it in whole blocks of {}",
                         len, block_size);
    }
  }
  if (kind == Kind::mla && options.head_size) {
    return fmt::format("head_size is {}, mla has its own: 192 and 128, and 576 and 512",
                       *options.head_size);
  }
  if (kind == Kind::mla && options.num_kv_heads) {
    return fmt::format("num_kv_heads is {}, mla has its own: num_heads, and 1",
                       *options.num_kv_heads);
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

/// Of one batch and length that the user gave.
std::vector<Size> sizes_of(Kind kind, std::int64_t batch, std::int64_t len, const Table& table,
                           std::int64_t block_size) {
  switch (kind) {
    case Kind::decode:
      return {{batch, 1, len}};
    case Kind::chunked:
      return {{batch, std::min(table.chunk, len), len}};
    case Kind::mixed:
      return {chunks_behind(batch, 1, std::min(table.chunk, len), len)};
    case Kind::cascade:
      return {sharing(batch, shared_prefix(len, block_size), len)};
    case Kind::mla:
      return len > 1 ? std::vector{whole(batch, len), Size{batch, 1, len}}
                     : std::vector{Size{batch, 1, len}};
    default:
      return {whole(batch, len)};
  }
}

std::vector<Size> sizes_of(Kind kind, const ShapeOptions& options, const Table& table,
                           std::int64_t block_size) {
  const std::vector<Size>& usual = table.sizes(kind);
  if (options.batch.empty() && options.seq_len.empty()) {
    return usual;
  }
  // One request has nobody to share a prefix with.
  const std::vector<std::int64_t> batches =
      options.batch.empty() ? std::vector{kind == Kind::cascade ? usual.front().batch : 1}
                            : options.batch;
  const std::vector<std::int64_t> lens =
      options.seq_len.empty() ? std::vector{usual.front().kv_len} : options.seq_len;
  std::vector<Size> sizes;
  for (const std::int64_t batch : batches) {
    for (const std::int64_t len : lens) {
      for (const Size& size : sizes_of(kind, batch, len, table, block_size)) {
        sizes.push_back(size);
      }
    }
  }
  return sizes;
}

/// Keys, values and heads as DeepSeek's layers have them on either way.
void set_mla_sizes(Shape& shape) {
  constexpr MlaDims kDims;
  shape.num_kv_heads = shape.latent() ? 1 : shape.num_heads;
  shape.head_size = shape.latent() ? kDims.cache_entry() : kDims.qk_head_dim();
  shape.head_size_v = shape.latent() ? kDims.kv_lora_rank : kDims.v_head_dim;
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
    case Kind::mixed:
      return "mixed";
    case Kind::cascade:
      return "cascade";
    case Kind::mla:
      return "mla";
    case Kind::cache_write:
      return "cache-write";
    case Kind::naive:
      break;
  }
  return "naive";
}

std::string kind_names() {
  std::vector<std::string_view> names;
  for (const Kind kind : kKinds) {
    names.push_back(to_string(kind));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

std::optional<Kind> kind_from_string(std::string_view name) {
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](Kind kind) { return to_string(kind) == name; });
  return found == kKinds.end() ? std::nullopt : std::optional(*found);
}

AttentionSpec Shape::spec() const {
  AttentionSpec spec;
  spec.num_heads = num_heads;
  spec.dtype = dtype;
  spec.kv_cache_dtype = kv_cache_dtype;
  if (kind == Kind::mla) {
    // One layer, whichever way it goes.
    spec.mla = MlaDims{};
    spec.num_kv_heads = 1;
    spec.head_size = spec.mla->cache_entry();
    spec.head_size_v = spec.mla->kv_lora_rank;
    spec.scale = 1.0F / std::sqrt(static_cast<float>(spec.mla->qk_head_dim()));
    return spec;
  }
  spec.num_kv_heads = num_kv_heads;
  spec.head_size = head_size;
  spec.head_size_v = head_size_v;
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
  if (kind == Kind::cache_write) {
    return 0;
  }
  const Window window{-1, causal ? 0 : -1};
  const std::int64_t pairs = decodes * visible_pairs(1, kv_len, window) +
                             (batch - decodes) * visible_pairs(q_len, kv_len, window);
  return 2.0 * static_cast<double>(pairs) *
         static_cast<double>(num_heads * (head_size + value_size()));
}

double Shape::kv_bytes() const {
  const std::int64_t keys = prefix_len + batch * (kv_len - prefix_len);
  const std::int64_t entry = head_size + (latent() ? 0 : value_size());
  return static_cast<double>(keys) *
         static_cast<double>(num_kv_heads * entry * size_of(kv_cache_dtype));
}

double Shape::least_bytes() const {
  const auto rows = static_cast<double>(tokens());
  if (kind == Kind::cache_write) {
    return rows * static_cast<double>(num_kv_heads * (head_size + value_size()) *
                                      (size_of(dtype) + size_of(kv_cache_dtype)));
  }
  return kv_bytes() +
         rows * static_cast<double>(num_heads * (head_size * size_of(dtype) +
                                                 value_size() * size_of(output_dtype())));
}

std::string Shape::text() const {
  std::string lengths = q_len == kv_len ? fmt::format("{} x {}", batch, kv_len)
                                        : fmt::format("{} x {} of {}", batch, q_len, kv_len);
  if (decodes > 0) {
    lengths = fmt::format("{} x 1 + {} x {} of {}", decodes, batch - decodes, q_len, kv_len);
  }
  if (prefix_len > 0) {
    lengths += fmt::format(", {} shared", prefix_len);
  }
  const std::string size = value_size() == head_size
                               ? fmt::format("{}", head_size)
                               : fmt::format("{} and {}", head_size, value_size());
  return fmt::format("{} {}, {}/{} heads of {}, {}{}", to_string(kind), lengths, num_heads,
                     num_kv_heads, size, causal ? "causal" : "full",
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
    const std::int64_t block_size = plain ? 0 : options.block_size.value_or(kBlockSize);
    const std::vector<Size> sizes = sizes_of(kind, options, table, block_size);
    std::vector<std::int64_t> head_sizes{options.head_size.value_or(128)};
    if (kind == Kind::prefill && !options.head_size) {
      head_sizes = {64, 128, 256};
    }
    for (const std::int64_t head_size : head_sizes) {
      Shape shape;
      shape.kind = kind;
      shape.head_size = head_size;
      shape.num_heads = wide ? std::max<std::int64_t>(1, table.prefill_width / head_size)
                        : kind == Kind::mla ? table.mla_heads
                                            : table.num_heads;
      shape.num_kv_heads = wide ? shape.num_heads : table.num_kv_heads;
      if (options.num_heads) {
        shape.num_heads = *options.num_heads;
        shape.num_kv_heads = shape.num_heads;
      }
      shape.num_kv_heads = options.num_kv_heads.value_or(shape.num_kv_heads);
      shape.block_size = block_size;
      shape.dtype = dtype;
      shape.kv_cache_dtype = plain ? dtype : options.kv_cache_dtype.value_or(dtype);
      shape.causal = !wide;
      shape.spec().validate();
      for (const Size& size : sizes) {
        check(size.batch <= kMaxTokens / size.kv_len,
              "batch is {} with a seq_len of {}, together they may have at most {} tokens",
              size.batch, size.kv_len, kMaxTokens);
        Shape sized = shape;
        sized.batch = size.batch;
        sized.q_len = size.q_len;
        sized.kv_len = size.kv_len;
        sized.decodes = size.decodes;
        sized.prefix_len = size.prefix_len;
        if (kind == Kind::mla) {
          // Whole prompts come decompressed.
          const bool decompressed = size.q_len == size.kv_len && size.q_len > 1;
          sized.block_size = decompressed ? 0 : block_size;
          sized.kv_cache_dtype = decompressed ? dtype : shape.kv_cache_dtype;
          set_mla_sizes(sized);
        }
        shapes.push_back(sized);
        if (kind != Kind::prefill) {
          continue;
        }
        sized.causal = true;
        shapes.push_back(sized);
        if (plain && !options.block_size && &size == &sizes.front()) {
          // What the cache costs against plain tensors.
          shapes.push_back(sized);
          shapes.back().block_size = kBlockSize;
        }
      }
    }
  }
  check(!shapes.empty(), "kinds: the other options leave nothing to run");
  return shapes;
}

}  // namespace foveal::bench
