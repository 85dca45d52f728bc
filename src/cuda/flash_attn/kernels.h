#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/flash_attn/heuristics.h"
#include "cuda/jit.h"
#include "foveal/spec.h"

// The kernels of FLASH_ATTN by what they are specialised for.
namespace foveal::cuda::flash_attn {

/// What a forward kernel is compiled for; `features` are those that cost instructions.
struct ForwardVariant {
  DType dtype = DType::bf16;
  DType cache_dtype = DType::bf16;
  DType output_dtype = DType::bf16;
  HeadShape head;
  int pages_per_block = 1;  ///< Blocks of the kernel in one of the cache manager.
  bool left_bound = false;
  bool right_bound = false;  ///< Causal too.
  bool alibi = false;
  bool soft_cap = false;
  bool sinks = false;
  bool signed_scale = false;  ///< The scale is not positive.
  int cache_vector_bytes = 16;
  int row_vector_bytes = 16;
  bool joint_addresses = true;  ///< Keys and values have the same head size and strides; sm_80.
  TileConfig tile;

  friend auto operator<=>(const ForwardVariant&, const ForwardVariant&) = default;
};

struct CacheWriteVariant {
  DType dtype = DType::bf16;
  DType cache_dtype = DType::bf16;
  int head_size = 0;
  int head_size_v = 0;
  int vector = 8;  ///< Elements moved at a time.

  friend auto operator<=>(const CacheWriteVariant&, const CacheWriteVariant&) = default;
};

struct MergeVariant {
  DType dtype = DType::bf16;
  int head_size_v = 0;
  int vector = 8;
  bool sinks = false;

  friend auto operator<=>(const MergeVariant&, const MergeVariant&) = default;
};

KernelKey forward_key(const ForwardVariant& variant, const std::string& arch);
KernelKey cache_write_key(const CacheWriteVariant& variant, const std::string& arch);
KernelKey merge_key(const MergeVariant& variant, const std::string& arch);
KernelKey plan_key(const std::string& arch);

/// The loaded kernel, compiled if need be; found again without any text being built. Thread-safe.
const Kernel& forward_kernel(const ForwardVariant& variant, int device);
const Kernel& cache_write_kernel(const CacheWriteVariant& variant, int device);
const Kernel& merge_kernel(const MergeVariant& variant, int device);
const Kernel& plan_kernel(int device);

/// Query heads of a layer with ALiBi or sinks: their values travel as kernel parameters.
inline constexpr int kMaxHeadValues = 256;

/// What a query in fp8 is answered in by default; another's output has its own dtype.
DType output_dtype(const AttentionSpec& spec);

/// The variant of a layer whose tensors are aligned to 16 bytes. `page_size` 0: plain keys.
ForwardVariant forward_variant(const AttentionSpec& spec, bool causal, std::int64_t page_size,
                               int pages_per_block, const TileConfig& tile);
HeadShape head_shape(const AttentionSpec& spec, std::int64_t page_size);

/// Every kernel that a model's layers may need in a paged cache: for `foveal prebuild`.
std::vector<KernelKey> keys_for_model(const AttentionSpec& spec, std::int64_t block_size,
                                      const std::string& arch);

}  // namespace foveal::cuda::flash_attn
