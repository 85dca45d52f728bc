#include "reference/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "core/convert.h"
#include "core/index.h"
#include "reference/contract.h"

namespace foveal::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::int64_t offset_of(const TensorView& tensor, std::initializer_list<std::int64_t> index) {
  std::int64_t offset = 0;
  int dim = 0;
  for (const std::int64_t i : index) {
    offset += i * tensor.stride(dim++);
  }
  return offset;
}

std::int64_t load_int(const TensorView& tensor, std::initializer_list<std::int64_t> index) {
  return static_cast<std::int64_t>(load(tensor, index));
}

/// A request of the step.
struct Request {
  std::int64_t index;
  std::int64_t query_start;
  std::int64_t query_len;
  std::int64_t key_start;  ///< Plain keys: where they begin.
  std::int64_t seq_len;
};

Request request_of(const CommonAttentionMetadata& common, std::int64_t index) {
  const TensorView& key_start_loc =
      common.key_start_loc.empty() ? common.query_start_loc : common.key_start_loc;
  const std::int64_t start = load_int(common.query_start_loc, {index});
  return {.index = index,
          .query_start = start,
          .query_len = load_int(common.query_start_loc, {index + 1}) - start,
          .key_start = load_int(key_start_loc, {index}),
          .seq_len = load_int(common.seq_lens, {index})};
}

/// Where a token of a request stands in keys and values.
struct Slot {
  std::int64_t block;
  std::int64_t token;
};

Slot slot_of(const Tensors& tensors, const ReferenceMetadata& metadata, const Request& request,
             std::int64_t position) {
  if (!tensors.paged) {
    return {0, request.key_start + position};
  }
  // Block b of the table is the kernel's blocks b·r … b·r + r − 1.
  const std::int64_t r = metadata.kernel_blocks_per_block();
  const std::int64_t kernel_block = position / metadata.block_size();
  const std::int64_t block =
      load_int(metadata.common().block_table, {request.index, kernel_block / r});
  return {block * r + kernel_block % r, position % metadata.block_size()};
}

/// All of a request's tokens of one KV head, [seq_len, head size], dequantised. Only slots that the
/// length reaches are read.
std::vector<double> gather(const TensorView& cache, double scale, const Tensors& tensors,
                           const ReferenceMetadata& metadata, const Request& request,
                           std::int64_t kv_head) {
  const std::int64_t size = cache.size(3);
  std::vector<double> tokens(at(request.seq_len * size));
  for (std::int64_t position = 0; position < request.seq_len; ++position) {
    const Slot slot = slot_of(tensors, metadata, request, position);
    for (std::int64_t d = 0; d < size; ++d) {
      tokens[at(position * size + d)] = load(cache, {slot.block, slot.token, kv_head, d}) * scale;
    }
  }
  return tokens;
}

/// Attention of one row over the keys [begin, end). Two passes: all scores, then their softmax.
Part attend_row(const AttentionSpec& spec, bool causal, std::span<const double> query,
                std::span<const double> keys, std::span<const double> values,
                std::int64_t head_size_v, ScoreIndex index, std::int64_t begin, std::int64_t end) {
  const std::size_t head_size = query.size();
  // A key that is not seen has the score −inf and takes part in nothing below.
  std::vector<double> scores(at(std::max<std::int64_t>(end - begin, 0)), -kInfinity);
  double max_score = -kInfinity;
  for (std::int64_t position = begin; position < end; ++position) {
    index.key_position = position;
    if (!is_visible(spec, causal, index)) {
      continue;
    }
    double product = 0.0;
    for (std::size_t d = 0; d < head_size; ++d) {
      product += query[d] * keys[at(position) * head_size + d];
    }
    const double s = score(spec, product, index);
    scores[at(position - begin)] = s;
    // Written so that a NaN stays.
    max_score = s > max_score || std::isnan(s) ? s : max_score;
  }

  Part part{std::vector<double>(at(head_size_v), 0.0), -kInfinity};
  if (max_score == -kInfinity) {
    return part;  // Contract 1: nothing is seen.
  }
  double sum = 0.0;
  for (std::int64_t position = begin; position < end; ++position) {
    const double s = scores[at(position - begin)];
    if (s == -kInfinity) {
      continue;
    }
    const double weight = std::exp(s - max_score);
    sum += weight;
    for (std::int64_t d = 0; d < head_size_v; ++d) {
      part.output[at(d)] += weight * values[at(position * head_size_v + d)];
    }
  }
  for (double& element : part.output) {
    element /= sum;
  }
  part.lse = max_score + std::log(sum);
  return part;
}

/// Contract 5: the sink is one more term of the denominator, exp(sink), and has no value, so it
/// takes its share of the mass. The LSE stays without it.
void apply_sink(Part& part, double sink) {
  if (part.lse == -kInfinity) {
    return;
  }
  for (double& element : part.output) {
    element /= 1.0 + std::exp(sink - part.lse);
  }
}

void write_row(const Tensors& tensors, std::int64_t row, std::int64_t head, const Part& part) {
  for (std::int64_t d = 0; d < tensors.output.size(2); ++d) {
    store(tensors.output, {row, head, d}, part.output[at(d)]);
  }
  if (!tensors.lse.empty()) {
    store(tensors.lse, {head, row}, part.lse);
  }
}

/// Every row of a request, for the query heads that read one KV head.
void attend_request(const AttentionSpec& spec, const Tensors& tensors,
                    const ReferenceMetadata& metadata, const Request& request,
                    std::int64_t kv_head) {
  const std::int64_t head_size = tensors.query.size(2);
  const std::int64_t head_size_v = tensors.output.size(2);
  const std::int64_t group_size = tensors.query.size(1) / tensors.key.size(2);
  const bool causal = metadata.common().causal;
  const auto keys = gather(tensors.key, tensors.key_scale, tensors, metadata, request, kv_head);
  const auto values =
      gather(tensors.value, tensors.value_scale, tensors, metadata, request, kv_head);

  std::vector<double> query(at(head_size));
  for (std::int64_t row = 0; row < request.query_len; ++row) {
    for (std::int64_t head = kv_head * group_size; head < (kv_head + 1) * group_size; ++head) {
      for (std::int64_t d = 0; d < head_size; ++d) {
        query[at(d)] =
            load(tensors.query, {request.query_start + row, head, d}) * tensors.query_scale;
      }
      const ScoreIndex index{.request = request.index,
                             .query_head = head,
                             .query_row = row,
                             .query_position = request.seq_len - request.query_len + row,
                             .key_position = 0};
      const auto attend_keys = [&](std::int64_t begin, std::int64_t end) {
        return attend_row(spec, causal, query, keys, values, head_size_v, index, begin, end);
      };
      const std::int64_t prefix = std::min(metadata.common_prefix_len(), request.seq_len);
      Part part = prefix > 0 ? merge(attend_keys(0, prefix), attend_keys(prefix, request.seq_len))
                             : attend_keys(0, request.seq_len);
      if (!spec.sinks.empty()) {
        apply_sink(part, spec.sinks[at(head)]);
      }
      write_row(tensors, request.query_start + row, head, part);
    }
  }
}

}  // namespace

double load(const TensorView& tensor, std::initializer_list<std::int64_t> index) {
  return load_element(tensor.data(), tensor.dtype(), offset_of(tensor, index));
}

void store(const TensorView& tensor, std::initializer_list<std::int64_t> index, double value) {
  store_element(tensor.data(), tensor.dtype(), offset_of(tensor, index), value);
}

double scale_of(const TensorView& tensor, float scale) {
  return is_fp8(tensor.dtype()) ? static_cast<double>(scale) : 1.0;
}

TensorView as_one_block(const TensorView& plain) {
  const std::array<std::int64_t, 4> shape{1, plain.size(0), plain.size(1), plain.size(2)};
  const std::array<std::int64_t, 4> strides{0, plain.stride(0), plain.stride(1), plain.stride(2)};
  return {plain.data(), plain.dtype(), shape, strides, plain.device()};
}

TensorView with_one_head(const TensorView& tensor) {
  std::vector<std::int64_t> shape(tensor.shape().begin(), tensor.shape().end());
  std::vector<std::int64_t> strides(tensor.strides().begin(), tensor.strides().end());
  shape.insert(shape.end() - 1, 1);
  strides.insert(strides.end() - 1, 0);
  return {tensor.data(), tensor.dtype(), shape, strides, tensor.device()};
}

Part merge(const Part& a, const Part& b) {
  // What an empty part holds is not looked at: it may be NaN.
  const bool a_empty = std::isinf(a.lse);
  const bool b_empty = std::isinf(b.lse);
  if (a_empty && b_empty) {
    return {std::vector<double>(a.output.size(), 0.0), -kInfinity};
  }
  if (a_empty || b_empty) {
    return a_empty ? b : a;
  }
  const double max_lse = std::max(a.lse, b.lse);
  const double weight_a = std::exp(a.lse - max_lse);
  const double weight_b = std::exp(b.lse - max_lse);
  Part merged{std::vector<double>(a.output.size()), max_lse + std::log(weight_a + weight_b)};
  for (std::size_t d = 0; d < merged.output.size(); ++d) {
    merged.output[d] = (weight_a * a.output[d] + weight_b * b.output[d]) / (weight_a + weight_b);
  }
  return merged;
}

ReferenceMetadata::ReferenceMetadata(const char* backend, const BuilderConfig& config,
                                     const CommonAttentionMetadata& common,
                                     std::int64_t common_prefix_len)
    : AttentionMetadata(backend, config, common, common_prefix_len),
      kernel_blocks_per_block_(
          config.kernel_block_size == 0 ? 1 : config.block_size / config.kernel_block_size) {}

void attend(const AttentionSpec& spec, const Tensors& tensors, const ReferenceMetadata& metadata,
            ThreadPool& pool) {
  const CommonAttentionMetadata& common = metadata.common();
  const std::int64_t num_kv_heads = tensors.key.size(2);
  pool.parallel_for(common.num_reqs * num_kv_heads, [&](std::int64_t task, int) {
    attend_request(spec, tensors, metadata, request_of(common, task / num_kv_heads),
                   task % num_kv_heads);
  });

  // Rows of padding that no request owns.
  const Part nothing{std::vector<double>(at(tensors.output.size(2)), 0.0), -kInfinity};
  const std::int64_t owned = load_int(common.query_start_loc, {common.num_reqs});
  for (std::int64_t row = owned; row < common.num_actual_tokens; ++row) {
    for (std::int64_t head = 0; head < tensors.output.size(1); ++head) {
      write_row(tensors, row, head, nothing);
    }
  }
}

}  // namespace foveal::reference
