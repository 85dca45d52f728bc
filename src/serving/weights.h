#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "serving/model.h"

namespace foveal::serving {

/// How the numbers of a stored tensor are coded. The q types are ggml's blocks of 32 elements along
/// a row: a float16 scale (and for q4_1 a float16 minimum), then the quantised elements.
enum class Encoding : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1 };

struct EncodingInfo {
  std::string_view name;
  std::int64_t block_elements;
  std::int64_t block_bytes;
};
EncodingInfo info_of(Encoding encoding);

/// A tensor in a file: `data` holds `elements` coded elements (whole blocks), at any alignment.
struct StoredTensor {
  Encoding encoding = Encoding::f32;
  const std::byte* data = nullptr;
  std::int64_t elements = 0;

  std::int64_t bytes() const;
};

/// Decodes to float32, in parallel. `out` has room for all elements.
void decode(const StoredTensor& tensor, float* out);

/// What a format calls the tensors of a Llama-type decoder; "{}" stands for the layer.
struct TensorNames {
  std::string_view token_embedding, attn_norm, q, k, v, output, ffn_norm, gate, up, down,
      output_norm, lm_head;
};

/// Finds a tensor by name; throws io when it is missing, when it is not of `shape`, or when its
/// bytes do not all lie in the file.
using FindTensor =
    std::function<StoredTensor(const std::string& name, const std::vector<std::int64_t>& shape)>;

/// Throws io, naming `file` and the field, for numbers that no model has, so that products of any
/// two sizes fit in int64; `config.vocab_size` included.
void check_config(const ModelConfig& config, const std::string& file);

/// All names that assemble_model asks for; with `tied`, lm_head is not among them.
std::unordered_set<std::string> expected_tensors(const ModelConfig& config,
                                                 const TensorNames& names, bool tied);

/// Builds the model, `config` checked. Every tensor is found, and so checked, before the first
/// large allocation.
Model assemble_model(const ModelConfig& config, const TensorNames& names, bool tied,
                     const FindTensor& find, ProgressFn progress, void* user);

}  // namespace foveal::serving
