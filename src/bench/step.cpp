#include "bench/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "core/convert.h"
#include "foveal/selector.h"

namespace foveal::bench {
namespace {

// Query, keys and values differ; the paged cache has its keys and values of the same numbers, at
// different places.
constexpr std::uint32_t kQuerySeed = 1;
constexpr std::uint32_t kKeySeed = 2;
constexpr std::uint32_t kValueSeed = 3;
constexpr std::uint32_t kCacheSeed = 4;

/// Picks an index in [0, count) for each sample: first, last, and two between.
struct Sample {
  double request, row, head;
};
constexpr std::array<Sample, 4> kSamples{{{0, 0, 0}, {1, 1, 1}, {0.5, 0.34, 0.6}, {0.3, 0.7, 0.4}}};

std::int64_t pick(double fraction, std::int64_t count) {
  return std::min(count - 1, static_cast<std::int64_t>(fraction * static_cast<double>(count)));
}

std::int64_t element_offset(const void* base, const void* data, DType dtype) {
  return (static_cast<const std::byte*>(data) - static_cast<const std::byte*>(base)) /
         size_of(dtype);
}

}  // namespace

const Numbers& NumberStore::get(DType dtype, std::uint32_t seed) {
  const std::pair key(dtype, seed);
  const auto found = numbers_.find(key);
  return found != numbers_.end() ? found->second
                                 : numbers_.try_emplace(key, dtype, seed).first->second;
}

Step::Step(Machine& machine, const Shape& shape, const AttentionBackend& backend,
           NumberStore& numbers)
    : machine_(machine), s_(shape) {
  const bool paged = s_.block_size > 0;
  const AttentionSpec spec = s_.spec();
  if (paged) {
    make_table();
  }
  builder_ = backend.make_builder(
      {.spec = spec,
       .block_size = paged ? s_.block_size : preferred_block_size(backend),
       .num_blocks = num_blocks_,
       .max_num_reqs = s_.batch,
       .max_num_tokens = s_.tokens(),
       .num_threads =
           machine.device().type == DeviceType::cpu ? machine.context().pool().num_threads() : 0,
       .device = machine.device(),
       .stream = machine.context().stream});
  if (s_.kind == Kind::mla) {
    mla_impl_ = backend.make_mla_impl(spec);
  } else {
    impl_ = backend.make_impl(spec);
  }

  starts_.push_back(0);
  for (std::int64_t r = 0; r < s_.batch; ++r) {
    starts_.push_back(starts_.back() + static_cast<std::int32_t>(s_.queries(r)));
  }
  lens_.assign(static_cast<std::size_t>(s_.batch), static_cast<std::int32_t>(s_.kv_len));
  common_.num_reqs = s_.batch;
  common_.num_actual_tokens = s_.tokens();
  common_.max_query_len = s_.q_len;
  common_.max_seq_len = s_.kv_len;
  common_.causal = s_.causal;
  common_.query_start_loc = upload(starts_, DType::i32, {s_.batch + 1});
  common_.seq_lens = upload(lens_, DType::i32, {s_.batch});
  common_.query_start_loc_host = {starts_.data(), DType::i32, {s_.batch + 1}};
  common_.seq_lens_host = {lens_.data(), DType::i32, {s_.batch}};
  if (paged) {
    common_.block_table = upload(table_, DType::i32, {s_.batch, width_});
    make_cache(backend, numbers);
  } else {
    std::vector<std::int32_t> key_starts;
    for (std::int64_t r = 0; r <= s_.batch; ++r) {
      key_starts.push_back(static_cast<std::int32_t>(r * s_.kv_len));
    }
    common_.key_start_loc = upload(key_starts, DType::i32, {s_.batch + 1});
  }
  if (!paged || s_.kind == Kind::cache_write) {
    key_numbers_ = &numbers.get(s_.dtype, kKeySeed);
    value_numbers_ = &numbers.get(s_.dtype, kValueSeed);
    const std::int64_t keys = s_.batch * s_.kv_len;
    args_.key = random_tensor(*key_numbers_, {keys, s_.num_kv_heads, s_.head_size});
    args_.value = random_tensor(*value_numbers_, {keys, s_.num_kv_heads, s_.value_size()});
  }
  if (s_.kind == Kind::cache_write) {
    std::vector<std::int64_t> slots;
    for (std::int64_t token = 0; token < s_.tokens(); ++token) {
      slots.push_back(slot(token / s_.kv_len, token % s_.kv_len));
    }
    common_.slot_mapping = upload(slots, DType::i64, {s_.tokens()});
    return;
  }
  query_numbers_ = &numbers.get(s_.dtype, kQuerySeed);
  args_.query = random_tensor(*query_numbers_, {s_.tokens(), s_.num_heads, s_.head_size});
  const std::vector<std::int64_t> rows{s_.tokens(), s_.num_heads, s_.value_size()};
  const DType output = s_.output_dtype();
  args_.output =
      TensorView(keep(s_.tokens() * s_.num_heads * s_.value_size() * size_of(output)).get(), output,
                 rows, machine_.device());
}

/// Blocks in random order. Block 0 is the null block of engines.
void Step::make_table() {
  width_ = (s_.kv_len + s_.block_size - 1) / s_.block_size;
  const std::int64_t shared = s_.prefix_len / s_.block_size;
  const std::int64_t own = width_ - shared;
  num_blocks_ = shared + s_.batch * own + 1;
  std::vector<std::int32_t> blocks(static_cast<std::size_t>(num_blocks_ - 1));
  std::iota(blocks.begin(), blocks.end(), 1);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(kCacheSeed));
  for (std::int64_t r = 0; r < s_.batch; ++r) {
    for (std::int64_t i = 0; i < width_; ++i) {
      table_.push_back(blocks[static_cast<std::size_t>(i < shared ? i : r * own + i)]);
    }
  }
}

std::shared_ptr<void> Step::keep(std::int64_t bytes) {
  memory_.push_back(machine_.allocate(bytes));
  return memory_.back();
}

template <typename T>
TensorView Step::upload(const std::vector<T>& values, DType dtype,
                        std::vector<std::int64_t> shape) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  const std::shared_ptr<void> memory = keep(bytes);
  machine_.copy(memory.get(), values.data(), bytes);
  return {memory.get(), dtype, shape, machine_.device()};
}

TensorView Step::random_tensor(const Numbers& numbers, std::vector<std::int64_t> shape) {
  const std::int64_t count =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  const std::int64_t bytes = count * size_of(s_.dtype);
  const std::shared_ptr<void> memory = keep(bytes);
  numbers.fill(machine_, memory.get(), bytes);
  return {memory.get(), s_.dtype, shape, machine_.device()};
}

void Step::make_cache(const AttentionBackend& backend, NumberStore& numbers) {
  const KVCacheSpec kv_spec = KVCacheSpec::from(s_.spec(), s_.block_size);
  const KVCacheLayout layout = backend.kv_cache_layout(kv_spec, num_blocks_);
  cache_ = keep(layout.size_bytes()).get();
  key_numbers_ = value_numbers_ = &numbers.get(s_.kv_cache_dtype, kCacheSeed);
  key_numbers_->fill(machine_, cache_, layout.size_bytes());
  const TensorView cache = layout.view(cache_, machine_.device());
  args_.kv_cache = s_.latent() ? KVCacheView{cache, cache} : backend.kv_cache_view(cache, kv_spec);
}

std::int64_t Step::slot(std::int64_t request, std::int64_t position) const {
  const std::int64_t block =
      table_[static_cast<std::size_t>(request * width_ + position / s_.block_size)];
  return block * s_.block_size + position % s_.block_size;
}

/// Elements from the beginning of the cache's memory to a head's row.
std::int64_t Step::cache_offset(const TensorView& view, std::int64_t slot,
                                std::int64_t kv_head) const {
  return element_offset(cache_, view.data(), view.dtype()) + slot / s_.block_size * view.stride(0) +
         slot % s_.block_size * view.stride(1) + kv_head * view.stride(2);
}

void Step::build(std::int64_t common_prefix_len) {
  metadata_ = builder_->build(common_prefix_len, common_);
}

void Step::forward() const {
  if (impl_ != nullptr) {
    impl_->forward(args_, *metadata_, machine_.context());
  } else if (s_.latent()) {
    mla_impl_->forward_mqa(
        {.query = args_.query, .kv_cache = args_.kv_cache.key, .output = args_.output}, *metadata_,
        machine_.context());
  } else {
    mla_impl_->forward_mha(
        {.query = args_.query, .key = args_.key, .value = args_.value, .output = args_.output},
        *metadata_, machine_.context());
  }
}

void Step::forget_output() const {
  const std::int64_t bytes = args_.output.numel() * size_of(args_.output.dtype());
  // NaN, in every dtype.
  const std::vector<std::byte> nan(static_cast<std::size_t>(bytes), std::byte{0xFF});
  machine_.copy(args_.output.as<std::byte>(), nan.data(), bytes);
}

void Step::write_cache() const {
  impl_->update_kv_cache(args_.key, args_.value, args_.kv_cache, common_.slot_mapping,
                         machine_.context());
}

NaiveProblem Step::naive_problem() const {
  return {.heads = s_.batch * s_.num_heads,
          .rows = s_.q_len,
          .keys = s_.kv_len,
          .head_size = s_.head_size,
          .scale = s_.spec().softmax_scale(),
          .dtype = s_.dtype,
          .query = args_.query.data(),
          .key = args_.key.data(),
          .value = args_.value.data(),
          .output = args_.output.data(),
          .scores = nullptr};
}

void Step::naive(void* scores) const {
  // The same memory, taken as heads before tokens: other rows than attention sees, as random.
  NaiveProblem problem = naive_problem();
  problem.scores = scores;
  machine_.naive(problem);
}

double Step::row_error(const SampledRow& row) const {
  const std::int64_t size_v = s_.value_size();
  const double scale = s_.spec().softmax_scale();
  std::vector<double> scores;
  for (std::int64_t key = 0; key < row.num_keys; ++key) {
    const std::int64_t at = row.key_at(key);
    double score = 0;
    for (std::int64_t i = 0; i < s_.head_size; ++i) {
      score += query_numbers_->at(row.row * s_.head_size + i) * key_numbers_->at(at + i);
    }
    scores.push_back(scale * score);
  }
  const double maximum = *std::max_element(scores.begin(), scores.end());
  std::vector<double> expected(static_cast<std::size_t>(size_v));
  double sum = 0;
  for (std::int64_t key = 0; key < row.num_keys; ++key) {
    const double weight = std::exp(scores[static_cast<std::size_t>(key)] - maximum);
    const std::int64_t at = row.value_at(key);
    sum += weight;
    for (std::int64_t i = 0; i < size_v; ++i) {
      expected[static_cast<std::size_t>(i)] += weight * value_numbers_->at(at + i);
    }
  }
  const DType dtype = args_.output.dtype();
  const std::int64_t bytes = size_v * size_of(dtype);
  std::vector<std::byte> output(static_cast<std::size_t>(bytes));
  machine_.copy(output.data(), args_.output.as<std::byte>() + row.row * bytes, bytes);
  double difference = 0;
  double norm = 0;
  for (std::int64_t i = 0; i < size_v; ++i) {
    const double right = expected[static_cast<std::size_t>(i)] / sum;
    difference += std::pow(load_element(output.data(), dtype, i) - right, 2);
    norm += std::pow(right, 2);
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

double Step::forward_error() const {
  double largest = 0;
  for (const Sample& sample : kSamples) {
    const std::int64_t request = pick(sample.request, s_.batch);
    const std::int64_t queries = s_.queries(request);
    const std::int64_t query = pick(sample.row, queries);
    const std::int64_t head = pick(sample.head, s_.num_heads);
    const std::int64_t kv_head = head / (s_.num_heads / s_.num_kv_heads);
    const auto at = [&](const TensorView& plain, const TensorView& cached, std::int64_t key) {
      return cached.empty()
                 ? (request * s_.kv_len + key) * plain.stride(0) + kv_head * plain.stride(1)
                 : cache_offset(cached, slot(request, key), kv_head);
    };
    largest = std::max(
        largest,
        row_error(
            {.row = (starts_[static_cast<std::size_t>(request)] + query) * s_.num_heads + head,
             .num_keys = s_.causal ? s_.kv_len - queries + query + 1 : s_.kv_len,
             .key_at = [&](std::int64_t key) { return at(args_.key, args_.kv_cache.key, key); },
             .value_at =
                 [&](std::int64_t key) { return at(args_.value, args_.kv_cache.value, key); }}));
  }
  return largest;
}

double Step::naive_error() const {
  double largest = 0;
  for (const Sample& sample : kSamples) {
    const std::int64_t head = pick(sample.head, s_.batch * s_.num_heads);
    const std::int64_t row = pick(sample.row, s_.q_len);
    const auto at = [&](std::int64_t key) { return (head * s_.kv_len + key) * s_.head_size; };
    largest = std::max(
        largest,
        row_error(
            {.row = head * s_.q_len + row, .num_keys = s_.kv_len, .key_at = at, .value_at = at}));
  }
  return largest;
}

double Step::write_error() const {
  const std::int64_t element = size_of(s_.kv_cache_dtype);
  const std::int64_t bytes = s_.head_size * element;
  std::vector<std::byte> expected(static_cast<std::size_t>(bytes));
  std::vector<std::byte> written(expected.size());
  for (const Sample& sample : kSamples) {
    const std::int64_t token = pick(sample.row, s_.tokens());
    const std::int64_t kv_head = pick(sample.head, s_.num_kv_heads);
    const std::int64_t source = (token * s_.num_kv_heads + kv_head) * s_.head_size;
    for (const auto& [view, numbers] :
         {std::pair(args_.kv_cache.key, key_numbers_), {args_.kv_cache.value, value_numbers_}}) {
      for (std::int64_t i = 0; i < s_.head_size; ++i) {
        store_element(expected.data(), s_.kv_cache_dtype, i, numbers->at(source + i));
      }
      const std::int64_t at =
          cache_offset(view, slot(token / s_.kv_len, token % s_.kv_len), kv_head);
      machine_.copy(written.data(), static_cast<std::byte*>(cache_) + at * element, bytes);
      if (std::memcmp(expected.data(), written.data(), expected.size()) != 0) {
        return std::numeric_limits<double>::infinity();
      }
    }
  }
  return 0;
}

}  // namespace foveal::bench
