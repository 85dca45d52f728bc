#include "cuda/flash_attn/tensor_maps.h"

#include "cuda/flash_attn/tensor_args.h"

namespace foveal::cuda::flash_attn {
namespace {

constexpr std::int64_t kBoxBytes = 128;  // A row of the swizzle.

TensorMapType type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return TensorMapType::f16;
    case DType::bf16:
      return TensorMapType::bf16;
    default:
      return TensorMapType::u8;
  }
}

/// `heads` and `tokens` are what a box has of each.
TensorMap map_of(const TensorView& tensor, int heads, int tokens) {
  TensorMapSpec spec;
  spec.type = type_of(tensor.dtype());
  spec.rank = 4;
  spec.address = const_cast<void*>(tensor.data());
  spec.swizzle = TensorMapSwizzle::bytes128;
  spec.l2_promotion = TensorMapL2Promotion::bytes256;
  // Innermost first: size, heads, tokens, blocks.
  const int dims = tensor.ndim();
  spec.size.fill(1);
  spec.stride_bytes.fill(16);
  for (int i = 0; i < dims; ++i) {
    const int dim = i == 0 ? dims - 1 : i == 1 ? dims - 2 : i == 2 ? dims - 3 : 0;
    const auto at = static_cast<std::size_t>(i);
    spec.size[at] = static_cast<std::uint64_t>(tensor.size(dim));
    // The stride of a dimension of size 1 is never used, and may be anything.
    if (i > 0 && tensor.size(dim) > 1) {
      spec.stride_bytes[at] =
          static_cast<std::uint64_t>(tensor.stride(dim) * size_of(tensor.dtype()));
    }
  }
  spec.box = {static_cast<std::uint32_t>(kBoxBytes / size_of(tensor.dtype())),
              static_cast<std::uint32_t>(heads), static_cast<std::uint32_t>(tokens), 1, 1};
  return encode_tiled(spec);
}

}  // namespace

bool copies_in_bulk(const TensorView& tensor) {
  constexpr std::int64_t kMaxStrideBytes = std::int64_t{1} << 40;
  constexpr std::int64_t kMaxSize = std::int64_t{1} << 32;
  if (vector_bytes(tensor) != 16 || tensor.numel() == 0) {
    return false;
  }
  for (int d = 0; d + 1 < tensor.ndim(); ++d) {
    const std::int64_t bytes = tensor.stride(d) * size_of(tensor.dtype());
    if (tensor.size(d) > 1 &&
        (bytes <= 0 || bytes >= kMaxStrideBytes || tensor.size(d) > kMaxSize)) {
      return false;
    }
  }
  return true;
}

TensorMaps tensor_maps(const TensorView& query, const TensorView& key, const TensorView& value,
                       const TileConfig& tile, const HeadShape& head) {
  const int tokens = tile.sm90_shape(head).box_tokens();
  return {map_of(query, head.group, tile.block_m() / head.group), map_of(key, 1, tokens),
          map_of(value, 1, tokens)};
}

}  // namespace foveal::cuda::flash_attn
