#include "problem/run.h"

#include <algorithm>
#include <array>
#include <optional>

#include "core/check.h"
#include "core/index.h"
#include "foveal/selector.h"
#include "problem/memory.h"

namespace foveal::problem {
namespace {

/// Blocks may be much larger than what stands in them, so that a small file asks for a large cache.
constexpr std::int64_t kMaxCacheElements = std::int64_t{1} << 32;

TensorView view_of(std::vector<std::int32_t>& numbers) {
  return {numbers.data(), DType::i32, {std::ssize(numbers)}};
}

/// The integer tensors of a step.
struct StepTables {
  explicit StepTables(const AttentionProblem& problem) {
    std::int64_t queries = 0;
    std::int64_t keys = 0;
    for (std::int64_t r = 0; r < std::ssize(problem.requests) + problem.padded_requests; ++r) {
      const Request request =
          r < std::ssize(problem.requests) ? problem.requests[at(r)] : Request{};
      seq_lens.push_back(static_cast<std::int32_t>(request.kv_len));
      query_start_loc.push_back(static_cast<std::int32_t>(queries += request.q_len));
      key_start_loc.push_back(static_cast<std::int32_t>(keys += request.kv_len));
      max_query_len = std::max(max_query_len, request.q_len);
      max_seq_len = std::max(max_seq_len, request.kv_len);
    }
  }

  CommonAttentionMetadata metadata(const AttentionProblem& problem) {
    CommonAttentionMetadata common;
    common.num_reqs = std::ssize(seq_lens);
    common.num_actual_tokens = problem.rows();
    common.max_query_len = max_query_len;
    common.max_seq_len = max_seq_len;
    common.query_start_loc = view_of(query_start_loc);
    common.seq_lens = view_of(seq_lens);
    common.causal = problem.causal;
    if (!problem.paged && key_start_loc != query_start_loc) {
      common.key_start_loc = view_of(key_start_loc);
    }
    return common;
  }

  std::vector<std::int32_t> query_start_loc{0};
  std::vector<std::int32_t> key_start_loc{0};
  std::vector<std::int32_t> seq_lens;
  std::int64_t max_query_len = 0;
  std::int64_t max_seq_len = 0;
};

/// What update_kv_cache is given: `tokens[i]` (of all requests') goes to `slots[i]`; both −1 for
/// padding.
struct CacheUpdate {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> slots;
};

/// Decoders write this step's keys, one a query row; cross attention writes the encoder's, all of
/// them.
CacheUpdate plan_update(const AttentionProblem& problem, const BlockPlan& plan) {
  const bool cross = problem.spec.attn_type == AttnType::encoder_decoder;
  CacheUpdate update;
  for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
    const auto& [q_len, kv_len] = problem.requests[at(r)];
    for (std::int64_t position = cross ? 0 : kv_len - q_len; position < kv_len; ++position) {
      const bool padding = position < 0;
      update.tokens.push_back(padding ? -1 : problem.key_start(r) + position);
      update.slots.push_back(padding ? kPaddingSlot : plan.slot(problem, r, position));
    }
  }
  if (!cross) {
    update.tokens.resize(at(problem.rows()), -1);
    update.slots.resize(at(problem.rows()), kPaddingSlot);
  }
  return update;
}

/// One run: everything that must live until forward has returned.
class Run {
 public:
  Run(const AttentionProblem& problem, const AttentionBackend& backend, const RunOptions& options)
      : problem_(problem),
        spec_(problem.spec),
        backend_(backend),
        options_(options),
        impl_(backend.make_impl(problem.spec)),
        tables_(problem),
        common_(tables_.metadata(problem)),
        query_("query", spec_.dtype, problem.rows() + options.padded_rows, spec_.num_heads,
               spec_.head_size, options.row_gap, options.poison),
        output_("output", problem.output_dtype(), problem.rows() + options.padded_rows,
                spec_.num_heads, spec_.value_head_size(), options.row_gap,
                std::numeric_limits<double>::quiet_NaN()),
        lse_("lse", DType::f32, spec_.num_heads, problem.rows() + options.padded_rows, 1,
             options.row_gap, std::numeric_limits<double>::quiet_NaN()) {
    context_.threads = options.threads;
    query_.fill(0, problem.query, 0, problem.rows());
    query_.buffer.seal();
    output_.buffer.seal();
    output_.buffer.allow(output_.view.slice(0, 0, problem.rows()));
    lse_.buffer.seal();
    lse_.buffer.allow(lse_.view.slice(1, 0, problem.rows()));
    config_.spec = problem.spec;
    config_.block_size = problem.block_size;
    config_.num_splits = options.num_splits;
    config_.num_threads = options.num_threads;
    config_.batch_invariant = options.batch_invariant;
    args_.query = query_.view;
    args_.output = output_.view;
    if (options.want_lse) {
      args_.lse = lse_.view.select(2, 0);
    }
  }

  RunResult result() {
    problem_.paged ? prepare_cache() : prepare_plain();
    const auto builder = backend_.make_builder(config_);
    const auto metadata =
        builder->build(options_.cascade ? problem_.common_prefix_len : 0, common_);
    impl_->forward(args_, *metadata, context_);

    RunResult result{
        .backend = std::string(backend_.name()), .output = {}, .lse = {}, .damage = {}};
    result.output = output_.read(problem_.rows());
    if (options_.want_lse) {
      const std::vector<double> padded = lse_.read(spec_.num_heads);
      for (std::int64_t i = 0; i < spec_.num_heads * problem_.rows(); ++i) {
        result.lse.push_back(
            padded[at(i / problem_.rows() * lse_.view.size(1) + i % problem_.rows())]);
      }
    }
    for (const RowTensor* tensor :
         {&query_, &output_, &lse_, key_ ? &*key_ : nullptr, value_ ? &*value_ : nullptr}) {
      if (tensor != nullptr) {
        add_damage(result, tensor->buffer, tensor->names);
      }
    }
    if (cache_) {
      add_damage(result, cache_->buffer, cache_->names);
    }
    return result;
  }

 private:
  static void add_damage(RunResult& result, const GuardedBuffer& buffer, const NamedViews& names) {
    for (std::string& message : buffer.damage(names)) {
      result.damage.push_back(std::move(message));
    }
  }

  void make_keys(std::int64_t rows) {
    key_.emplace("key", spec_.dtype, rows, spec_.num_kv_heads, spec_.head_size, options_.row_gap,
                 options_.poison);
    value_.emplace("value", spec_.dtype, rows, spec_.num_kv_heads, spec_.value_head_size(),
                   options_.row_gap, options_.poison);
  }

  void prepare_plain() {
    make_keys(problem_.keys() + options_.padded_rows);
    key_->fill(0, problem_.key, 0, problem_.keys());
    value_->fill(0, problem_.value, 0, problem_.keys());
    key_->buffer.seal();
    value_->buffer.seal();
    args_.key = key_->view;
    args_.value = value_->view;
  }

  void prepare_cache() {
    plan_.emplace(problem_, options_.seed);
    const std::array<AttentionBackendPtr, 1> backends{
        AttentionBackendPtr(AttentionBackendPtr(), &backend_)};
    config_.kernel_block_size = options_.kernel_block_size != 0
                                    ? options_.kernel_block_size
                                    : select_kernel_block_size(problem_.block_size, backends);
    check(problem_.block_size % config_.kernel_block_size == 0,
          "kernel_block_size is {}, it must divide the block_size {}", config_.kernel_block_size,
          problem_.block_size);
    config_.num_blocks = plan_->num_blocks;
    common_.block_table = {plan_->table.data(), DType::i32, {common_.num_reqs, plan_->width}};
    const CacheShape shape =
        cache_shape(problem_, backend_, options_.cache,
                    plan_->num_blocks * (problem_.block_size / config_.kernel_block_size),
                    config_.kernel_block_size);
    if (shape.elements > kMaxCacheElements) {
      fail(ErrorCode::out_of_memory, "the cache has {} elements, a problem's may have {} at most",
           shape.elements, kMaxCacheElements);
    }
    cache_.emplace(spec_.cache_dtype(), shape, options_.poison);
    args_.kv_cache = cache_->view;
    fill_cache();
  }

  void fill_cache() {
    const bool update = options_.update_cache && spec_.kv_sharing_target.empty();
    update_ = update ? plan_update(problem_, *plan_) : CacheUpdate{};
    std::vector<bool> is_new(at(problem_.keys()), false);
    for (const std::int64_t token : update_.tokens) {
      if (token >= 0) {
        is_new[at(token)] = true;
      }
    }
    for (std::int64_t r = 0; r < std::ssize(problem_.requests); ++r) {
      for (std::int64_t position = 0; position < problem_.requests[at(r)].kv_len; ++position) {
        const std::int64_t token = problem_.key_start(r) + position;
        if (!is_new[at(token)]) {
          cache_->write(problem_, token, plan_->slot(problem_, r, position));
        }
      }
    }
    cache_->buffer.seal();
    if (update) {
      update_cache();
    }
  }

  void update_cache() {
    const std::int64_t count = std::ssize(update_.tokens);
    make_keys(count + options_.padded_rows);
    for (std::int64_t row = 0; row < count; ++row) {
      if (update_.tokens[at(row)] >= 0) {
        key_->fill(row, problem_.key, update_.tokens[at(row)], 1);
        value_->fill(row, problem_.value, update_.tokens[at(row)], 1);
        cache_->expect(problem_, update_.tokens[at(row)], update_.slots[at(row)]);
      }
    }
    key_->buffer.seal();
    value_->buffer.seal();
    const TensorView slot_mapping(update_.slots.data(), DType::i64, {count});
    if (spec_.attn_type == AttnType::decoder) {
      common_.slot_mapping = slot_mapping;
    }
    impl_->update_kv_cache(key_->view, value_->view, cache_->view, slot_mapping, context_);
  }

  const AttentionProblem& problem_;
  const AttentionSpec& spec_;
  const AttentionBackend& backend_;
  const RunOptions& options_;
  std::unique_ptr<AttentionImpl> impl_;
  StepTables tables_;
  CommonAttentionMetadata common_;
  RowTensor query_;
  RowTensor output_;
  RowTensor lse_;  ///< [num_heads, rows, 1]
  std::optional<RowTensor> key_;
  std::optional<RowTensor> value_;
  std::optional<BlockPlan> plan_;
  std::optional<CacheMemory> cache_;
  CacheUpdate update_;
  BuilderConfig config_;
  ExecutionContext context_;
  ForwardArgs args_;
};

}  // namespace

SelectorConfig selector_config(const AttentionProblem& problem, std::string_view id) {
  SelectorConfig config = SelectorConfig::from(problem.spec);
  config.use_non_causal = problem.spec.attn_type == AttnType::decoder && !problem.causal;
  config.needs_lse = true;
  if (problem.paged) {
    config.block_size = problem.block_size;
  }
  config.backend = id;
  return config;
}

AttentionBackendPtr choose_backend(const AttentionProblem& problem, std::string_view id) {
  return select_backend(selector_config(problem, id));
}

RunResult run_problem(const AttentionProblem& problem, const AttentionBackend& backend,
                      const RunOptions& options) {
  problem.validate();
  if (backend.capabilities().device != DeviceType::cpu) {
    fail(ErrorCode::unsupported, "backend {} runs on {}, problems run on the CPU's backends",
         backend.name(), to_string(backend.capabilities().device));
  }
  return Run(problem, backend, options).result();
}

}  // namespace foveal::problem
