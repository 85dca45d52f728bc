#include "serving/step_tensors.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/convert.h"
#include "serving/layers.h"

namespace foveal::serving {
namespace {

/// What a table takes, aligned for the next.
std::int64_t padded(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

void narrow(const float* from, std::int64_t count, DType dtype, std::byte* to) {
  if (dtype == DType::f32) {
    std::copy_n(from, count, reinterpret_cast<float*>(to));
    return;
  }
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  if (dtype == DType::f16) {
    std::transform(from, from + count, halves, float_to_f16);
  } else {
    std::transform(from, from + count, halves, float_to_bf16);
  }
}

void widen(const std::byte* from, std::int64_t count, DType dtype, float* to) {
  if (dtype == DType::f32) {
    std::copy_n(reinterpret_cast<const float*>(from), count, to);
    return;
  }
  const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
  if (dtype == DType::f16) {
    std::transform(halves, halves + count, to, f16_to_float);
  } else {
    std::transform(halves, halves + count, to, bf16_to_float);
  }
}

}  // namespace

StepTables::StepTables(AttentionDevice& device, const StepLimits& limits) : device_(device) {
  if (device.device().type != DeviceType::cpu) {
    bytes_ = padded((limits.num_seqs + 1) * size_of(DType::i32)) +
             padded(limits.num_seqs * size_of(DType::i32)) +
             padded(limits.num_seqs * limits.blocks_per_seq * size_of(DType::i32)) +
             padded(limits.num_tokens * size_of(DType::i64));
    tables_ = device.allocate_mirror(bytes_);
  }
}

CommonAttentionMetadata StepTables::upload(const CommonAttentionMetadata& host) {
  CommonAttentionMetadata step = host;
  if (device_.device().type == DeviceType::cpu) {
    return step;
  }
  // One after the other, so that one copy brings them all.
  std::int64_t end = 0;
  const auto place = [&](const TensorView& table) {
    const std::int64_t bytes = table.numel() * size_of(table.dtype());
    check(end + bytes <= bytes_,
          "the tables of a step of {} requests and {} tokens exceed the {} bytes kept for them",
          host.num_reqs, host.num_actual_tokens, bytes_);
    std::memcpy(tables_.host + end, table.data(), static_cast<std::size_t>(bytes));
    const TensorView placed(tables_.device + end, table.dtype(), table.shape(), device_.device());
    end += padded(bytes);
    return placed;
  };
  step.query_start_loc = place(host.query_start_loc);
  step.seq_lens = place(host.seq_lens);
  step.block_table = place(host.block_table);
  step.slot_mapping = place(host.slot_mapping);
  step.query_start_loc_host = host.query_start_loc;
  step.seq_lens_host = host.seq_lens;
  device_.upload(tables_, end);
  return step;
}

StepTensors::StepTensors(AttentionDevice& device, const AttentionSpec& spec,
                         const StepLimits& limits)
    : device_(device),
      dtype_(spec.dtype),
      num_heads_(spec.num_heads),
      num_qkv_heads_(spec.num_heads + 2 * spec.num_kv_heads),
      head_size_(spec.head_size),
      in_place_(spec.dtype == DType::f32 && device.device().type == DeviceType::cpu),
      tables_(device, limits) {
  if (!in_place_) {
    const std::int64_t head_bytes = head_size_ * size_of(dtype_);
    qkv_ = device.allocate_mirror(limits.num_tokens * num_qkv_heads_ * head_bytes);
    output_ = device.allocate_mirror(limits.num_tokens * num_heads_ * head_bytes);
  }
}

TensorView StepTensors::upload_qkv(float* qkv, std::int64_t num_tokens, ThreadPool& threads) {
  const std::int64_t shape[] = {num_tokens, num_qkv_heads_, head_size_};
  if (in_place_) {
    return TensorView(qkv, dtype_, shape);
  }
  const std::int64_t width = num_qkv_heads_ * head_size_;
  const std::int64_t row_bytes = width * size_of(dtype_);
  for_rows(threads, num_tokens, [&](std::int64_t t) {
    narrow(qkv + t * width, width, dtype_, qkv_.host + t * row_bytes);
  });
  device_.upload(qkv_, num_tokens * row_bytes);
  return TensorView(qkv_.device, dtype_, shape, device_.device());
}

TensorView StepTensors::output(float* attended, std::int64_t num_tokens) const {
  const std::int64_t shape[] = {num_tokens, num_heads_, head_size_};
  return in_place_ ? TensorView(attended, dtype_, shape)
                   : TensorView(output_.device, dtype_, shape, device_.device());
}

void StepTensors::download_output(float* attended, std::int64_t num_tokens, ThreadPool& threads) {
  if (in_place_) {
    return;
  }
  const std::int64_t width = num_heads_ * head_size_;
  const std::int64_t row_bytes = width * size_of(dtype_);
  device_.download(output_, num_tokens * row_bytes);
  for_rows(threads, num_tokens, [&](std::int64_t t) {
    widen(output_.host + t * row_bytes, width, dtype_, attended + t * width);
  });
}

}  // namespace foveal::serving
