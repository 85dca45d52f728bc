#include "serving/model_runner.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/check.h"
#include "serving/layers.h"
#include "serving/linear.h"

namespace foveal::serving {
namespace {

constexpr std::int64_t kMaxDefaultCacheBytes = std::int64_t{1} << 30;

AttentionSpec attention_spec(const ModelConfig& model, const RunnerConfig& config) {
  AttentionSpec spec;
  spec.num_heads = model.num_heads;
  spec.num_kv_heads = model.num_kv_heads;
  spec.head_size = model.head_size;
  spec.dtype = config.dtype.value_or(default_attention_dtype(config.device));
  check(spec.dtype == DType::f32 || spec.dtype == DType::f16 || spec.dtype == DType::bf16,
        "dtype was {}; it must be f32, f16 or bf16", to_string(spec.dtype));
  spec.kv_cache_dtype = config.kv_cache_dtype;
  return spec;
}

std::vector<float> floats(std::int64_t rows, std::int64_t cols) {
  return std::vector<float>(static_cast<std::size_t>(rows * cols));
}

}  // namespace

DType default_attention_dtype(DeviceType device) {
  return device == DeviceType::cpu ? DType::f32 : DType::f16;
}

ModelRunner::ModelRunner(const Model& model, const RunnerConfig& config)
    : model_(model),
      config_(model.config),
      threads_(make_thread_pool(config.num_threads)),
      device_(open_attention_device(config.device)) {
  check(
      config.max_num_seqs >= 1 && config.max_num_tokens >= config.max_num_seqs,
      "max_num_seqs was {} and max_num_tokens {}; there must be at least one token for each of at "
      "least one request",
      config.max_num_seqs, config.max_num_tokens);
  check(config.max_seq_len >= 1 && config.max_seq_len <= config_.max_seq_len,
        "max_seq_len was {}; it must be at least 1 and at most the model's {}", config.max_seq_len,
        config_.max_seq_len);
  context_.threads = threads_.get();
  context_.stream = device_->stream();

  const AttentionSpec spec = attention_spec(config_, config);
  SelectorConfig wanted = SelectorConfig::from(spec, config.device, device_->compute_capability());
  wanted.backend = config.backend;
  if (config.block_size != 0) {
    wanted.block_size = config.block_size;
  }
  const AttentionBackendPtr backend = select_backend(wanted);
  selection_ = explain_selection(wanted);
  block_size_ = config.block_size != 0 ? config.block_size : preferred_block_size(*backend);

  const KVCacheSpec cache_spec = KVCacheSpec::from(spec, block_size_);
  const std::int64_t per_sequence = (config.max_seq_len + block_size_ - 1) / block_size_;
  num_blocks_ = config.num_blocks;
  if (num_blocks_ == 0) {
    const std::int64_t affordable =
        kMaxDefaultCacheBytes / (cache_spec.page_size_bytes() * config_.num_layers);
    // One full sequence must fit, and block 0 is the null block.
    num_blocks_ =
        1 + std::max(per_sequence, std::min(config.max_num_seqs * per_sequence, affordable));
  }
  const KVCacheLayout layout = backend->kv_cache_layout(cache_spec, num_blocks_);
  // The memory is left as it comes: slots that hold no token never matter.
  const std::int64_t layer_bytes = (layout.size_bytes() + 63) / 64 * 64;
  cache_bytes_ = layer_bytes * config_.num_layers;
  std::byte* cache_memory = nullptr;
  try {
    cache_memory = device_->allocate(cache_bytes_);
  } catch (const Error& error) {
    fail(error.code(), "the KV cache of {} blocks on {} needs {} bytes: {}", num_blocks_,
         device_->describe(), cache_bytes_, error.what());
  }

  BuilderConfig builder_config;
  builder_config.spec = spec;
  builder_config.block_size = block_size_;
  builder_config.num_blocks = num_blocks_;
  builder_config.max_num_reqs = config.max_num_seqs;
  builder_config.max_num_tokens = config.max_num_tokens;
  builder_config.num_threads = threads_->num_threads();
  builder_config.device = device_->device();
  builder_config.stream = device_->stream();
  builder_ = backend->make_builder(builder_config);
  for (std::size_t l = 0; l < model_.layers.size(); ++l) {
    const TensorView cache =
        layout.view(cache_memory + static_cast<std::int64_t>(l) * layer_bytes, device_->device());
    layers_.push_back(
        {&model_.layers[l], backend->make_impl(spec), backend->kv_cache_view(cache, cache_spec)});
  }

  tensors_.emplace(*device_, spec,
                   StepLimits{.num_seqs = config.max_num_seqs,
                              .num_tokens = config.max_num_tokens,
                              .blocks_per_seq = per_sequence});

  for (std::int64_t i = 0; i < config_.head_size / 2; ++i) {
    rope_frequencies_.push_back(
        1.0F / std::pow(config_.rope_theta,
                        static_cast<float>(2 * i) / static_cast<float>(config_.head_size)));
  }
  const std::int64_t tokens = config.max_num_tokens;
  hidden_ = floats(tokens, config_.hidden_size);
  normed_ = floats(tokens, config_.hidden_size);
  qkv_ = floats(tokens, (config_.num_heads + 2 * config_.num_kv_heads) * config_.head_size);
  attended_ = floats(tokens, config_.num_heads * config_.head_size);
  gate_up_ = floats(tokens, 2 * config_.intermediate_size);
  activation_ = floats(tokens, config_.intermediate_size);
  rope_cos_ = floats(tokens, config_.head_size / 2);
  rope_sin_ = floats(tokens, config_.head_size / 2);
  logits_ = floats(config.max_num_seqs, config_.vocab_size);
}

std::span<const float> ModelRunner::forward(const StepInput& step) {
  const std::int64_t num_tokens = std::ssize(step.token_ids);
  embed(step);
  rope_tables(step);

  const AttentionMetadataPtr plan = builder_->build(0, tensors_->tables(step.attention));
  for (const Layer& layer : layers_) {
    attention(layer, *plan, num_tokens);
    feed_forward(layer, num_tokens);
  }

  // Only rows that a token is drawn from go through the head, which is as large as several layers.
  const std::int64_t width = config_.hidden_size;
  const std::int64_t num_rows = std::ssize(step.logits_rows);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const std::int64_t row = step.logits_rows[static_cast<std::size_t>(r)];
    rms_norm(hidden_.data() + row * width, model_.output_norm.data(), width, config_.rms_norm_eps,
             normed_.data() + r * width);
  }
  if (num_rows > 0) {
    linear(normed_.data(), num_rows, model_.head(), logits_.data(), false, *threads_);
  }
  return std::span(logits_).first(static_cast<std::size_t>(num_rows * config_.vocab_size));
}

void ModelRunner::embed(const StepInput& step) {
  const std::int64_t width = config_.hidden_size;
  for (std::size_t t = 0; t < step.token_ids.size(); ++t) {
    std::copy_n(model_.token_embedding.data.begin() + step.token_ids[t] * width, width,
                hidden_.begin() + static_cast<std::int64_t>(t) * width);
  }
}

/// The angles of the step's positions, the same for all layers. They are rounded to float32 before
/// their sines are taken, as in the programs that models are trained with.
void ModelRunner::rope_tables(const StepInput& step) {
  std::size_t i = 0;
  for (const std::int32_t position : step.positions) {
    for (const float frequency : rope_frequencies_) {
      const float angle = static_cast<float>(position) * frequency;
      rope_cos_[i] = std::cos(angle);
      rope_sin_[i] = std::sin(angle);
      ++i;
    }
  }
}

void ModelRunner::attention(const Layer& layer, const AttentionMetadata& plan,
                            std::int64_t num_tokens) {
  const std::int64_t width = config_.hidden_size;
  const std::int64_t head_size = config_.head_size;
  const std::int64_t rotated_heads = config_.num_heads + config_.num_kv_heads;
  const std::int64_t qkv_width = (rotated_heads + config_.num_kv_heads) * head_size;

  for_rows(*threads_, num_tokens, [&](std::int64_t t) {
    rms_norm(hidden_.data() + t * width, layer.weights->attn_norm.data(), width,
             config_.rms_norm_eps, normed_.data() + t * width);
  });
  linear(normed_.data(), num_tokens, layer.weights->qkv, qkv_.data(), false, *threads_);
  for_rows(*threads_, num_tokens, [&](std::int64_t t) {
    rope(qkv_.data() + t * qkv_width, rotated_heads, head_size,
         rope_cos_.data() + t * (head_size / 2), rope_sin_.data() + t * (head_size / 2),
         config_.rope_interleaved);
  });

  // Queries, keys and values are views of the projection's rows.
  const TensorView rows = tensors_->upload_qkv(qkv_.data(), num_tokens, *threads_);
  const auto heads_from = [&](std::int64_t first, std::int64_t count) {
    return rows.slice(1, first, first + count);
  };
  layer.attention->update_kv_cache(heads_from(config_.num_heads, config_.num_kv_heads),
                                   heads_from(rotated_heads, config_.num_kv_heads), layer.cache,
                                   plan.common().slot_mapping, context_);
  ForwardArgs args;
  args.query = heads_from(0, config_.num_heads);
  args.kv_cache = layer.cache;
  args.output = tensors_->output(attended_.data(), num_tokens);
  layer.attention->forward(args, plan, context_);
  tensors_->download_output(attended_.data(), num_tokens, *threads_);

  linear(attended_.data(), num_tokens, layer.weights->output, hidden_.data(), true, *threads_);
}

void ModelRunner::feed_forward(const Layer& layer, std::int64_t num_tokens) {
  const std::int64_t width = config_.hidden_size;
  const std::int64_t inner = config_.intermediate_size;
  for_rows(*threads_, num_tokens, [&](std::int64_t t) {
    rms_norm(hidden_.data() + t * width, layer.weights->ffn_norm.data(), width,
             config_.rms_norm_eps, normed_.data() + t * width);
  });
  linear(normed_.data(), num_tokens, layer.weights->gate_up, gate_up_.data(), false, *threads_);
  for_rows(*threads_, num_tokens, [&](std::int64_t t) {
    silu_and_mul(gate_up_.data() + t * 2 * inner, inner, activation_.data() + t * inner);
  });
  linear(activation_.data(), num_tokens, layer.weights->down, hidden_.data(), true, *threads_);
}

}  // namespace foveal::serving
