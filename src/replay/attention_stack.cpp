#include "replay/attention_stack.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.h"
#include "core/convert.h"
#include "serving/layers.h"

namespace foveal::replay {
namespace {

using Role = SyntheticRows::Role;

std::int64_t widest_row(const Geometry& geometry) {
  std::int64_t width = 0;
  for (const AttentionSpec& spec : geometry.layers) {
    width = std::max(width, spec.num_heads * spec.head_size);
  }
  return width;
}

}  // namespace

AttentionStack::AttentionStack(const StackConfig& config)
    : threads_(make_thread_pool(config.num_threads)),
      device_(serving::open_attention_device(config.device)),
      dtype_(config.dtype),
      rows_(config.dtype, widest_row(config.geometry)) {
  context_.threads = threads_.get();
  context_.stream = device_->stream();
  choose_backends(config);
  make_layers(config);
  tables_.emplace(*device_,
                  serving::StepLimits{.num_seqs = config.max_num_seqs,
                                      .num_tokens = config.max_num_tokens,
                                      .blocks_per_seq = config.max_seq_len / block_size_ + 1});
  // Layers of one geometry differ in their masks only.
  const AttentionSpec& spec = kinds_.front().spec;
  query_ = make_rows(spec.num_heads * spec.head_size, config.max_num_tokens);
  key_ = make_rows(spec.num_kv_heads * spec.head_size, config.max_num_tokens);
  if (!spec.mla) {
    value_ = make_rows(spec.num_kv_heads * spec.value_head_size(), config.max_num_tokens);
  }
  output_ = make_rows(spec.num_heads * spec.value_head_size(), config.max_num_tokens);
}

void AttentionStack::choose_backends(const StackConfig& config) {
  block_size_ = config.block_size;
  for (const AttentionSpec& of_geometry : config.geometry.layers) {
    if (std::ssize(kinds_) == config.num_layers) {
      break;  // Fewer layers than kinds.
    }
    AttentionSpec spec = of_geometry;
    spec.dtype = config.dtype;
    spec.kv_cache_dtype = config.kv_cache_dtype;
    SelectorConfig wanted =
        SelectorConfig::from(spec, config.device, device_->compute_capability());
    wanted.backend = config.backend;
    if (block_size_ != 0) {
      wanted.block_size = block_size_;
    }
    const AttentionBackendPtr backend = select_backend(wanted);
    if (block_size_ == 0) {
      block_size_ = preferred_block_size(*backend);
    }
    const std::string runtime = backend->runtime();
    selection_ += fmt::format("{}{}{}\n", explain_selection(wanted).summary(),
                              runtime.empty() ? "" : ", on ", runtime);
    if (backend_names_.find(backend->name()) == std::string::npos) {
      backend_names_ += fmt::format("{}{}", backend_names_.empty() ? "" : ", ", backend->name());
    }
    kinds_.push_back({std::move(spec), backend});
  }
}

void AttentionStack::make_layers(const StackConfig& config) {
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    block_bytes_ += KVCacheSpec::from(kind_of(l).spec, block_size_).page_size_bytes();
  }
  num_blocks_ = config.num_blocks(block_size_, block_bytes_, device_->memory_bytes());
  // Layer by layer the system would promise more than it has.
  const double bytes = static_cast<double>(num_blocks_) * static_cast<double>(block_bytes_);
  if (bytes > static_cast<double>(device_->memory_bytes())) {
    fail(ErrorCode::out_of_memory,
         "a KV cache of {} blocks of {} bytes over {} layers needs {:.1f} GiB; {} has {:.1f}",
         num_blocks_, block_bytes_, config.num_layers, bytes / kGiB, device_->describe(),
         static_cast<double>(device_->memory_bytes()) / kGiB);
  }
  for (Kind& kind : kinds_) {
    BuilderConfig builder;
    builder.spec = kind.spec;
    builder.block_size = block_size_;
    builder.num_blocks = num_blocks_;
    builder.max_num_reqs = config.max_num_seqs;
    builder.max_num_tokens = config.max_num_tokens;
    builder.num_threads = threads_->num_threads();
    builder.device = device_->device();
    builder.stream = device_->stream();
    kind.builder = kind.backend->make_builder(builder);
  }
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    const Kind& kind = kind_of(l);
    const KVCacheSpec cache_spec = KVCacheSpec::from(kind.spec, block_size_);
    const KVCacheLayout layout = kind.backend->kv_cache_layout(cache_spec, num_blocks_);
    std::byte* memory = nullptr;
    try {
      // It is left as it comes: slots that hold no token never matter.
      memory = device_->allocate(layout.size_bytes());
    } catch (const Error& error) {
      fail(error.code(), "the KV cache of {} blocks and {} layers on {} needs {} bytes: {}",
           num_blocks_, config.num_layers, device_->describe(), num_blocks_ * block_bytes_,
           error.what());
    }
    const TensorView cache = layout.view(memory, device_->device());
    Layer& layer = layers_.emplace_back();
    if (kind.spec.mla) {
      layer.mla = kind.backend->make_mla_impl(kind.spec);
      layer.latents = cache;
    } else {
      layer.attention = kind.backend->make_impl(kind.spec);
      layer.cache = kind.backend->kv_cache_view(cache, cache_spec);
    }
  }
}

AttentionStack::Rows AttentionStack::make_rows(std::int64_t width, std::int64_t num_tokens) {
  return {width, device_->allocate_mirror(num_tokens * width * size_of(dtype_))};
}

TensorView AttentionStack::view(const Rows& rows, std::int64_t num_tokens,
                                std::int64_t heads) const {
  const std::int64_t shape[] = {num_tokens, heads, rows.width / heads};
  return TensorView(rows.memory.device, dtype_, shape, device_->device());
}

std::int64_t AttentionStack::reorder_threshold() const {
  // Layers of one geometry differ in their masks only.
  return kinds_.front().builder->reorder_threshold().value_or(1);
}

void AttentionStack::fill(const serving::StepInput& step) {
  const std::int64_t num_tokens = std::ssize(step.token_ids);
  const auto row_at = [&](const Rows& rows, std::int64_t t) {
    return rows.memory.host + t * rows.width * size_of(dtype_);
  };
  serving::for_rows(*threads_, num_tokens, [&](std::int64_t t) {
    const std::int32_t token = step.token_ids[static_cast<std::size_t>(t)];
    rows_.copy_row(Role::query, token, query_.width, row_at(query_, t));
    rows_.copy_row(Role::key, token, key_.width, row_at(key_, t));
    if (value_.width > 0) {
      rows_.copy_row(Role::value, token, value_.width, row_at(value_, t));
    }
  });
  for (const Rows* rows : {&query_, &key_, &value_}) {
    if (rows->width > 0) {
      device_->upload(rows->memory, num_tokens * rows->width * size_of(dtype_));
    }
  }
  device_->wait();
}

void AttentionStack::run(const serving::StepInput& step, std::int64_t last_layer) {
  const CommonAttentionMetadata common = tables_->upload(step.attention);
  for (Kind& kind : kinds_) {
    kind.plan = kind.builder->build(0, common);
  }
  for (std::int64_t i = 1; i <= num_layers(); ++i) {
    const std::int64_t l = (last_layer + i) % num_layers();
    run_layer(layers_[static_cast<std::size_t>(l)], kind_of(l), common.num_actual_tokens);
  }
  device_->wait();
}

void AttentionStack::run_layer(const Layer& layer, const Kind& kind,
                               std::int64_t num_tokens) const {
  const AttentionSpec& spec = kind.spec;
  const TensorView& slot_mapping = kind.plan->common().slot_mapping;
  const TensorView query = view(query_, num_tokens, spec.num_heads);
  const TensorView output = view(output_, num_tokens, spec.num_heads);
  if (spec.mla) {
    const std::int64_t shape[] = {num_tokens, key_.width};
    const TensorView entries(key_.memory.device, dtype_, shape, device_->device());
    const std::int64_t rank = spec.mla->kv_lora_rank;
    layer.mla->update_kv_cache(entries.slice(1, 0, rank), entries.slice(1, rank, key_.width),
                               layer.latents, slot_mapping, context_);
    MlaDecodeArgs args;
    args.query = query;
    args.kv_cache = layer.latents;
    args.output = output;
    layer.mla->forward_mqa(args, *kind.plan, context_);
    return;
  }
  layer.attention->update_kv_cache(view(key_, num_tokens, spec.num_kv_heads),
                                   view(value_, num_tokens, spec.num_kv_heads), layer.cache,
                                   slot_mapping, context_);
  ForwardArgs args;
  args.query = query;
  args.kv_cache = layer.cache;
  args.output = output;
  layer.attention->forward(args, *kind.plan, context_);
}

std::vector<double> AttentionStack::output_row(std::int64_t row, std::int64_t head) {
  device_->download(output_.memory, (row + 1) * output_.width * size_of(dtype_));
  const std::int64_t size = kinds_.front().spec.value_head_size();
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < size; ++i) {
    numbers.push_back(
        load_element(output_.memory.host, dtype_, row * output_.width + head * size + i));
  }
  return numbers;
}

}  // namespace foveal::replay
