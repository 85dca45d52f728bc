// A run notices what a backend does that it must not: these backends are the oracle with one fault
// each.

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "foveal/registry.h"
#include "problem/judge.h"
#include "support/expect_error.h"

namespace foveal::problem {
namespace {

using ::testing::HasSubstr;

/// What a faulty backend does after the oracle's work.
struct Fault {
  std::function<void(const ForwardArgs&)> after_forward = [](const ForwardArgs&) {};
  std::function<void(const KVCacheView&)> after_update = [](const KVCacheView&) {};
};

class FaultyImpl final : public AttentionImpl {
 public:
  FaultyImpl(const AttentionBackend& oracle, const AttentionSpec& spec, const Fault& fault)
      : AttentionImpl("REFERENCE", spec), oracle_(oracle.make_impl(spec)), fault_(fault) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value, const KVCacheView& cache,
                          const TensorView& slots, const ExecutionContext& context) const override {
    oracle_->update_kv_cache(key, value, cache, slots, context);
    fault_.after_update(cache);
  }
  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& context) const override {
    oracle_->forward(args, metadata, context);
    fault_.after_forward(args);
  }

  std::unique_ptr<AttentionImpl> oracle_;
  const Fault& fault_;
};

class FaultyBackend final : public AttentionBackend {
 public:
  explicit FaultyBackend(Fault fault) : fault_(std::move(fault)) {}

  std::string_view name() const override { return "FAULTY"; }
  const BackendCapabilities& capabilities() const override { return oracle_->capabilities(); }
  std::vector<std::string> validate(const SelectorConfig& config) const override {
    return oracle_->validate(config);
  }
  KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                KVCacheOrder order) const override {
    return oracle_->kv_cache_layout(spec, num_blocks, order);
  }
  KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) const override {
    return oracle_->kv_cache_view(cache, spec);
  }
  std::unique_ptr<AttentionMetadataBuilder> make_builder(
      const BuilderConfig& config) const override {
    return oracle_->make_builder(config);
  }
  std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) const override {
    return std::make_unique<FaultyImpl>(*oracle_, spec, fault_);
  }
  std::unique_ptr<MlaAttentionImpl> make_mla_impl(const AttentionSpec& spec) const override {
    return oracle_->make_mla_impl(spec);
  }
  void reshape_and_cache(const TensorView&, const TensorView&, const KVCacheView&,
                         const TensorView&, const QuantScales&,
                         const ExecutionContext&) const override {}
  void merge_attn_states(const AttentionPart&, const AttentionPart&, const AttentionPart&,
                         const ExecutionContext&) const override {}

 private:
  AttentionBackendPtr oracle_ = BackendRegistry::global().get("REFERENCE");
  Fault fault_;
};

AttentionProblem make_run_problem() {
  AttentionProblem problem;
  problem.spec.num_heads = 4;
  problem.spec.num_kv_heads = 2;
  problem.spec.head_size = 16;
  problem.spec.dtype = DType::f32;
  problem.requests = {{3, 20}, {1, 33}, {2, 2}};
  problem.padded_requests = 1;
  problem.unowned_rows = 1;
  problem.fill_random(7);
  return problem;
}

/// The message of the comparison, with everything on that makes runs find faults.
std::string judge(Fault fault) {
  const AttentionProblem problem = make_run_problem();
  RunOptions options;
  options.padded_rows = 2;
  options.row_gap = 4;
  options.cache = CacheStyle::padded;
  const RunResult result = run_problem(problem, FaultyBackend(std::move(fault)), options);
  return compare(problem, result, solve(problem)).message;
}

void poke(const TensorView& view, std::int64_t offset, float value) {
  view.as<float>()[offset] = value;
}

TEST(Run, AFaultlessBackendPasses) { EXPECT_EQ(judge({}), ""); }

TEST(Run, FindsWritesOutsideOfTheRows) {
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 7 * 68, 1.0F); }}),
              HasSubstr("output[7, 0, 0] is 1, it must be nan"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 68 + 65, 1.0F); }}),
              HasSubstr("padding 2 elements behind output[1, 3, 15] is 1"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, -1, 1.0F); }}),
              HasSubstr("memory before output was overwritten"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 9 * 68, 1.0F); }}),
              HasSubstr("memory behind output was overwritten"));
  EXPECT_THAT(
      judge({.after_forward = [](const auto& a) { poke(a.lse, 7 * a.lse.stride(1), 1.0F); }}),
      HasSubstr("lse[0, 7, 0] is 1"));
}

TEST(Run, FindsWritesToInputs) {
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.query, 17, 1.0F); }}),
              HasSubstr("query[0, 1, 1] is 1"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.kv_cache.value, 3, 1.0F); }}),
              HasSubstr("kv_cache.value[0, 0, 0, 3] is 1, it must be nan"));
}

TEST(Run, FindsWrongCacheWrites) {
  // The null block's first slot, which nothing may write.
  EXPECT_THAT(judge({.after_update = [](const auto& c) { poke(c.key, 0, 1.0F); }}),
              HasSubstr("kv_cache.key[0, 0, 0, 0] is 1, it must be nan"));
  // Whatever was written is doubled.
  EXPECT_THAT(judge({.after_update =
                         [](const KVCacheView& cache) {
                           for (std::int64_t block = 0; block < cache.num_blocks(); ++block) {
                             poke(cache.key, block * cache.key.stride(0) + 1, 0.125F);
                           }
                         }}),
              HasSubstr("is 0.125, it must be"));
}

TEST(Run, NamesTheWrongNumber) {
  const std::string message =
      judge({.after_forward = [](const auto& a) { poke(a.output, 2 * 68 + 16 + 5, 9.0F); }});
  EXPECT_THAT(message, HasSubstr("output of request 0, row 2, head 1, dim 5: got 9, expected"));
  EXPECT_THAT(message, HasSubstr("bound"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 3 * 68, 9.0F); }}),
              HasSubstr("output of request 1, row 0, head 0, dim 0"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 6 * 68, 9.0F); }}),
              HasSubstr("output of row 6 of no request, head 0, dim 0: got 9, expected 0"));
  EXPECT_THAT(judge({.after_forward = [](const auto& a) { poke(a.output, 0, std::nanf("")); }}),
              HasSubstr("got nan"));
  EXPECT_THAT(
      judge({.after_forward =
                 [](const auto& a) { poke(a.lse, a.lse.stride(0) + a.lse.stride(1), 9.0F); }}),
      HasSubstr("lse of request 0, row 1, head 1: got 9"));
}

TEST(Run, IsTheSameWhateverTheMemory) {
  for (const DType cache : {DType::f32, DType::f8e4m3, DType::f8e5m2}) {
    AttentionProblem problem = make_run_problem();
    problem.spec.kv_cache_dtype = cache;
    problem.spec.scales = {.q = 1.0F, .k = 0.02F, .v = 0.03F};
    problem.fill_random(11);
    const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
    const RunResult first = run_problem(problem, *reference);
    EXPECT_EQ(compare(problem, first, solve(problem)).message, "");
    for (const CacheStyle style : {CacheStyle::nhd, CacheStyle::hnd, CacheStyle::kv_first,
                                   CacheStyle::packed, CacheStyle::padded}) {
      RunOptions options{.cache = style, .update_cache = style != CacheStyle::hnd, .seed = 3};
      options.poison = style == CacheStyle::packed ? 3.0 : options.poison;
      const RunResult other = run_problem(problem, *reference, options);
      EXPECT_TRUE(other.damage.empty()) << other.damage.front();
      EXPECT_EQ(other.output, first.output);
      EXPECT_EQ(other.lse, first.lse);
    }
  }
}

TEST(Run, RefusesContradictions) {
  using foveal::testing::expect_error;
  const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
  const auto refused = [&](auto change, const std::string& part) {
    AttentionProblem problem = make_run_problem();
    change(problem);
    expect_error(
        ErrorCode::invalid_argument, [&] { run_problem(problem, *reference); }, part);
  };
  refused([](auto& p) { p.query.pop_back(); }, "query has");
  refused([](auto& p) { p.stored_value.clear(); }, "stored_value has 0 numbers");
  refused([](auto& p) { p.common_prefix_len = 3; }, "common_prefix_len is 3");
  refused([](auto& p) { p.block_size = 0; }, "block_size is 0");
  refused([](auto& p) { p.requests[1].kv_len = -1; }, "kv_len -1");
  refused([](auto& p) { p.spec.attn_type = AttnType::encoder; }, "encoder has no cache");
  expect_error(
      ErrorCode::unsupported, [&] { choose_backend(make_run_problem(), "REFERENCE_MLA"); },
      "REFERENCE_MLA");
}

}  // namespace
}  // namespace foveal::problem
