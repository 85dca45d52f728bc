#pragma once

#include "cuda/driver.h"
#include "cuda/flash_attn/heuristics.h"
#include "foveal/tensor.h"

// Tensors as the copy engine (TMA) of sm_90a sees them: boxes of 64 elements of the head, heads and
// tokens.
namespace foveal::cuda::flash_attn {

/// Whether the copy engine can read it: rows at multiples of 16 bytes, positive strides of at most
/// 40 bits, no dimension of size 0.
bool copies_in_bulk(const TensorView& tensor);

/// What a kernel reads through: tiles of query rows, and of keys and values.
struct TensorMaps {
  TensorMap query;
  TensorMap key;
  TensorMap value;
};

/// query [rows, num_heads, size]; key and value [blocks, block_size, num_kv_heads, size], or plain
/// [keys, num_kv_heads, size].
TensorMaps tensor_maps(const TensorView& query, const TensorView& key, const TensorView& value,
                       const TileConfig& tile, const HeadShape& head);

}  // namespace foveal::cuda::flash_attn
