// Every failure mode of the contract has a message that names the argument, its value and what is
// accepted, and nothing is written when it is raised.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "foveal/foveal.h"
#include "support/expect_error.h"

namespace foveal {
namespace {

using testing::expect_error;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr float kCanary = 12345.0F;
constexpr float kCached = 7.0F;

/// A legal step of three requests (5, 1 and 0 queries over 20, 17 and 0 keys) that each test spoils
/// in one place.
class Failure : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr std::int64_t kHeads = 4;
  static constexpr std::int64_t kKvHeads = 2;
  static constexpr std::int64_t kSize = 16;
  static constexpr std::int64_t kBlocks = 6;
  static constexpr std::int64_t kBlockSize = 16;
  static constexpr std::int64_t kTokens = 6;

  Failure() {
    spec.num_heads = kHeads;
    spec.num_kv_heads = kKvHeads;
    spec.head_size = kSize;
    spec.dtype = DType::f32;
    common.num_reqs = 3;
    common.num_actual_tokens = kTokens;
    common.max_query_len = 5;
    common.max_seq_len = 20;
    common.query_start_loc = {query_start_loc.data(), DType::i32, {4}};
    common.seq_lens = {seq_lens.data(), DType::i32, {3}};
    common.block_table = {block_table.data(), DType::i32, {3, 2}};
    common.slot_mapping = {slot_mapping.data(), DType::i64, {kTokens}};
    args.query = {query.data(), DType::f32, {kTokens, kHeads, kSize}};
    args.kv_cache = {{key_cache.data(), DType::f32, {kBlocks, kBlockSize, kKvHeads, kSize}},
                     {value_cache.data(), DType::f32, {kBlocks, kBlockSize, kKvHeads, kSize}}};
    args.output = {output.data(), DType::f32, {kTokens, kHeads, kSize}};
    args.lse = {lse.data(), DType::f32, {kHeads, kTokens}};
    new_key = {new_keys.data(), DType::f32, {kTokens, kKvHeads, kSize}};
    new_value = {new_values.data(), DType::f32, {kTokens, kKvHeads, kSize}};
  }

  AttentionBackendPtr backend() const { return BackendRegistry::global().get(GetParam()); }
  BuilderConfig builder_config() const {
    BuilderConfig config;
    config.spec = spec;
    config.block_size = kBlockSize;
    config.num_blocks = kBlocks;
    return config;
  }
  AttentionMetadataPtr build(std::int64_t prefix = 0) {
    return backend()->make_builder(builder_config())->build(prefix, common);
  }

  template <typename... Parts>
  void build_fails(const Parts&... parts) {
    expect_error(
        kInvalid, [&] { build(); }, parts...);
  }
  template <typename... Parts>
  void forward_fails(const AttentionMetadata& metadata, const Parts&... parts) {
    expect_error(
        kInvalid, [&] { backend()->make_impl(spec)->forward(args, metadata); }, parts...);
    EXPECT_EQ(std::count(output.begin(), output.end(), kCanary), std::ssize(output))
        << "output was written";
    EXPECT_EQ(std::count(lse.begin(), lse.end(), kCanary), std::ssize(lse)) << "lse was written";
  }
  template <typename... Parts>
  void update_fails(const Parts&... parts) {
    expect_error(
        kInvalid,
        [&] {
          backend()->make_impl(spec)->update_kv_cache(new_key, new_value, args.kv_cache,
                                                      common.slot_mapping);
        },
        parts...);
    EXPECT_EQ(std::count(key_cache.begin(), key_cache.end(), kCached), std::ssize(key_cache))
        << "cache was written";
    EXPECT_EQ(std::count(value_cache.begin(), value_cache.end(), kCached), std::ssize(value_cache))
        << "cache was written";
  }

  AttentionSpec spec;
  CommonAttentionMetadata common;
  ForwardArgs args;
  TensorView new_key;
  TensorView new_value;

  std::vector<std::int32_t> query_start_loc{0, 5, 6, 6};
  std::vector<std::int32_t> seq_lens{20, 17, 0};
  std::vector<std::int32_t> block_table{1, 2, 4, 3, 0, 0};
  std::vector<std::int64_t> slot_mapping{31, 32, 33, 34, -1, 48};
  std::vector<float> query = std::vector<float>(kTokens * kHeads * kSize, 0.5F);
  std::vector<float> new_keys = std::vector<float>(kTokens * kKvHeads * kSize, 0.25F);
  std::vector<float> new_values = std::vector<float>(kTokens * kKvHeads * kSize, 0.75F);
  std::vector<float> key_cache =
      std::vector<float>(kBlocks * kBlockSize * kKvHeads * kSize, kCached);
  std::vector<float> value_cache = key_cache;
  std::vector<float> output = std::vector<float>(kTokens * kHeads * kSize, kCanary);
  std::vector<float> lse = std::vector<float>(kTokens * kHeads, kCanary);
};

TEST_P(Failure, TheStepIsLegalAsItStands) {
  const auto impl = backend()->make_impl(spec);
  impl->update_kv_cache(new_key, new_value, args.kv_cache, common.slot_mapping);
  impl->forward(args, *build());
  EXPECT_EQ(std::count(output.begin(), output.end(), kCanary), 0);
}

TEST_P(Failure, QueryStartLoc) {
  query_start_loc = {0, 5, 4, 6};
  build_fails("query_start_loc decreases from 5 to 4 at index 2");
  query_start_loc = {1, 5, 6, 6};
  build_fails("query_start_loc[0] is 1, it must be 0");
  query_start_loc = {0, 5, 6, 7};
  build_fails("query_start_loc ends at 7", "num_actual_tokens = 6");
  query_start_loc = {0, 6, 6, 6};
  build_fails("max_query_len is 5", "6 queries of request 0");
}

TEST_P(Failure, QueryStartLocShapeAndType) {
  common.query_start_loc = {query_start_loc.data(), DType::i32, {3}};
  build_fails("query_start_loc is i32[3]", "must be 4");
  common.query_start_loc = {query_start_loc.data(), DType::i64, {4}};
  build_fails("query_start_loc is i64[4]", "dtype must be i32");
  common.query_start_loc = {};
  build_fails("query_start_loc is absent");
  common.query_start_loc = {query_start_loc.data(), DType::i32, {4}, Device{DeviceType::cuda, 0}};
  build_fails("query_start_loc is i32[4] on cuda:0, it must be on cpu");
}

TEST_P(Failure, SeqLens) {
  seq_lens = {20, -1, 0};
  build_fails("seq_lens[1] is -1");
  seq_lens = {20, 21, 0};
  build_fails("max_seq_len is 20", "seq_lens[1] = 21");
}

TEST_P(Failure, TableTooNarrow) {
  seq_lens = {33, 17, 0};
  common.max_seq_len = 33;
  build_fails("block_table has 2 columns, request 0 with seq_len 33 needs 3 blocks of 16");
}

TEST_P(Failure, BlockIdOutOfRange) {
  block_table = {1, 6, 4, 3, 0, 0};
  build_fails("block_table[0][1] names block 6, it must be in [0, num_blocks = 6)");
  block_table = {1, 2, -3, 3, 0, 0};
  build_fails("block_table[1][0] names block -3");
  // What no length reaches is never looked at.
  block_table = {1, 2, 4, 3, 99, -99};
  build();
}

TEST_P(Failure, SlotOutOfRange) {
  slot_mapping[2] = kBlocks * kBlockSize;
  build_fails("slot_mapping[2] is 96, it must be in [0, 96), or -1");
  update_fails("slot_mapping[2] is 96");
  slot_mapping[2] = -2;
  build_fails("slot_mapping[2] is -2");
  update_fails("slot_mapping[2] is -2");
}

TEST_P(Failure, SlotMappingShape) {
  common.slot_mapping = {slot_mapping.data(), DType::i32, {kTokens}};
  build_fails("slot_mapping is i32[6]", "i64");
  update_fails("slot_mapping is i32[6]");
  std::vector<std::int64_t> longer(kTokens + 1, -1);
  common.slot_mapping = {longer.data(), DType::i64, {kTokens + 1}};
  build_fails("slot_mapping has 7 entries");
  update_fails("slot_mapping has 7 entries");
}

TEST_P(Failure, PlainKeysMustBeLongEnough) {
  common.block_table = {};
  build_fails("seq_lens[0] is 20, it may be at most the 5 keys");
  std::vector<std::int32_t> key_start_loc{0, 20, 37, 37};
  common.key_start_loc = {key_start_loc.data(), DType::i32, {4}};
  const AttentionMetadataPtr metadata = build();
  args.kv_cache = {};
  args.key = new_key;
  args.value = new_value;
  forward_fails(*metadata, "key is f32[6, 2, 16] on cpu, it must have at least 37 rows");
  key_start_loc = {0, 20, 10, 37};
  build_fails("key_start_loc decreases from 20 to 10");
}

TEST_P(Failure, PlainKeysAndTableExcludeEachOther) {
  common.key_start_loc = common.query_start_loc;
  build_fails("key_start_loc is given beside a block_table");
  common.key_start_loc = {};
  const AttentionMetadataPtr paged = build();
  args.kv_cache = {};
  forward_fails(*paged, "kv_cache is absent");
}

TEST_P(Failure, EncodersAreNotCausalAndHaveNoCache) {
  spec.attn_type = AttnType::encoder_only;
  build_fails("causal is true, it must be false for attn_type encoder_only");
  common.causal = false;
  build_fails("block_table is given, attn_type encoder_only has no cache");
}

TEST_P(Failure, HeadsNotDivisible) {
  spec.num_heads = 5;
  build_fails("num_heads is 5, it must be a multiple of num_kv_heads = 2");
  expect_error(
      kInvalid, [&] { backend()->make_impl(spec); }, "num_heads is 5");
}

TEST_P(Failure, BuilderConfig) {
  const auto refuses = [&](const std::string& part, auto&& change) {
    BuilderConfig config = builder_config();
    change(config);
    expect_error(
        kInvalid, [&] { backend()->make_builder(config); }, part);
  };
  refuses("block_size is 0", [](BuilderConfig& c) { c.block_size = 0; });
  refuses("kernel_block_size is 5, it must divide block_size = 16",
          [](BuilderConfig& c) { c.kernel_block_size = 5; });
  refuses("num_blocks is -1", [](BuilderConfig& c) { c.num_blocks = -1; });
  refuses("flash_attn_version is 1, it must be 2, 3, or 0",
          [](BuilderConfig& c) { c.flash_attn_version = 1; });
  refuses("block_size is 1099511627776, it must be in [1, 2147483648]",
          [](BuilderConfig& c) { c.block_size = std::int64_t{1} << 40; });
  refuses("num_splits is -2", [](BuilderConfig& c) { c.num_splits = -2; });
  refuses("num_splits is 4, it must be 0 or 1 where batch_invariant", [](BuilderConfig& c) {
    c.num_splits = 4;
    c.batch_invariant = true;
  });
}

TEST_P(Failure, HostCopiesDoNotHideTheTensors) {
  std::vector<std::int32_t> host_lens{20, 17, 0};
  common.seq_lens_host = {host_lens.data(), DType::i32, {3}};
  seq_lens = {2000000, 17, 0};
  build_fails("max_seq_len is 20", "seq_lens[0] = 2000000");
}

TEST_P(Failure, LayersThatTheBackendCannotServe) {
  spec.mla = MlaDims{8, 8, 8, 8};
  spec.num_kv_heads = 1;
  spec.scale = 1.0F;
  spec.head_size_v = 8;
  expect_error(
      ErrorCode::unsupported, [&] { backend()->make_impl(spec); }, "MLA is not supported");
  expect_error(
      ErrorCode::unsupported, [&] { backend()->make_builder(builder_config()); },
      "MLA is not supported");
}

TEST_P(Failure, DeviceOfTheBuilder) {
  BuilderConfig config = builder_config();
  config.device = {DeviceType::cuda, 0};
  expect_error(
      kInvalid, [&] { backend()->make_builder(config); }, "device is cuda:0", "cpu");
}

TEST_P(Failure, LocalLengthsAreNotIgnored) {
  common.cp_local_seq_lens = common.seq_lens;
  build_fails("cp_local_seq_lens is given");
}

TEST(CpuFailure, DtypesThatItDoesNotServe) {
  AttentionSpec spec;
  spec.num_heads = spec.num_kv_heads = 1;
  spec.head_size = 16;
  const AttentionBackendPtr cpu = BackendRegistry::global().get("CPU_ATTN");
  spec.dtype = DType::f64;
  expect_error(
      ErrorCode::unsupported, [&] { cpu->make_impl(spec); }, "dtype is f64, accepted are");
  spec.dtype = DType::f32;
  spec.kv_cache_dtype = DType::f64;
  expect_error(
      ErrorCode::unsupported, [&] { cpu->make_impl(spec); }, "kv_cache_dtype is f64");
  spec.kv_cache_dtype.reset();
  spec.head_size = 20;
  expect_error(
      ErrorCode::unsupported, [&] { cpu->make_impl(spec); }, "head_size is 20");
}

TEST_P(Failure, CommonPrefix) {
  expect_error(
      kInvalid, [&] { build(10); },
      "common_prefix_len is 10, it must be a multiple of the block size 16");
  expect_error(
      kInvalid, [&] { build(-16); }, "common_prefix_len is -16");
  expect_error(
      kInvalid, [&] { build(16); }, "request 0 has 15");
  seq_lens = {32, 17, 0};
  common.max_seq_len = 32;
  expect_error(
      kInvalid, [&] { build(16); }, "request 1 names other blocks");
  block_table = {1, 2, 1, 3, 0, 0};
  build(16);
  spec.window = Window::of_tokens(8);
  expect_error(
      kInvalid, [&] { build(16); }, "must be 0 for layers with a window");
}

TEST_P(Failure, ForwardShapes) {
  const AttentionMetadataPtr metadata = build();
  const ForwardArgs good = args;
  const auto refuses = [&](auto&& change, const auto&... parts) {
    args = good;
    change();
    forward_fails(*metadata, parts...);
    args = good;
  };
  refuses([&] { args.query = {}; }, "query is absent");
  refuses([&] { args.query = args.query.slice(0, 0, 5); }, "query is f32[5, 4, 16]",
          "num_actual_tokens = 6");
  refuses([&] { args.query = args.query.slice(1, 0, 3); }, "query is f32[6, 3, 16]",
          "dimension 1 must be 4");
  refuses([&] { args.query = args.query.slice(2, 0, 8); }, "query is f32[6, 4, 8]",
          "dimension 2 must be 16");
  refuses(
      [&] {
        args.query = TensorView(query.data(), DType::f16, {6, 4, 16});
      },
      "query is f16[6, 4, 16]", "must be f32");
  refuses(
      [&] {
        args.query = args.query.permute({0, 2, 1}).slice(1, 0, 4);
      },
      "query is f32[6, 4, 4]");
  refuses(
      [&] {
        args.query = TensorView(query.data(), DType::f32, std::vector<std::int64_t>{6, 4, 16},
                                std::vector<std::int64_t>{1, 96, 6});
      },
      "query has stride 6 in its last dimension");
  refuses([&] { args.output = {}; }, "output is absent");
  refuses([&] { args.output = args.output.slice(0, 0, 5); }, "output is f32[5, 4, 16]");
  refuses([&] { args.lse = args.lse.slice(1, 0, 5); }, "lse is f32[4, 5]");
  refuses([&] { args.lse = args.lse.slice(0, 0, 3); }, "lse is f32[3, 6]");
  refuses(
      [&] {
        args.kv_cache.key = args.kv_cache.key.slice(0, 0, 5);
        args.kv_cache.value = args.kv_cache.value.slice(0, 0, 5);
      },
      "kv_cache has 5 blocks, it must have the 6");
  refuses([&] { args.kv_cache.value = args.kv_cache.value.slice(0, 0, 5); },
          "kv_cache.value is f32[5, 16, 2, 16]");
  refuses([&] { args.kv_cache.key = args.kv_cache.key.slice(1, 0, 8); },
          "kv_cache.key is f32[6, 8, 2, 16]", "must be 16");
  refuses([&] { args.kv_cache.key = args.kv_cache.key.slice(2, 0, 1); },
          "kv_cache.key is f32[6, 16, 1, 16]");
  refuses(
      [&] {
        args.kv_cache.key = {args.kv_cache.key.data(), DType::bf16, {6, 16, 2, 16}};
      },
      "kv_cache.key is bf16");
  refuses(
      [&] {
        args.kv_cache.key = {
            args.kv_cache.key.data(), DType::f32, {6, 16, 2, 16}, Device{DeviceType::cuda, 0}};
      },
      "kv_cache.key", "on cuda:0, it must be on cpu");
  refuses(
      [&] {
        args.query = {query.data(), DType::f32, {6, 4, 16}, Device{DeviceType::cuda, 1}};
      },
      "on cuda:1");
}

TEST_P(Failure, UpdateShapes) {
  new_value = new_value.slice(0, 0, 5);
  update_fails("value is f32[5, 2, 16] on cpu, it must have the 6 rows of key");
  new_value = {new_values.data(), DType::f32, {kTokens, 1, kSize}};
  update_fails("value is f32[6, 1, 16]");
  new_key = {new_keys.data(), DType::bf16, {kTokens, kKvHeads, kSize}};
  update_fails("key is bf16[6, 2, 16]", "must be f32");
}

TEST_P(Failure, ForwardWithTheWrongMetadata) {
  const std::string other = GetParam() == "REFERENCE" ? "CPU_ATTN" : "REFERENCE";
  const AttentionMetadataPtr foreign =
      BackendRegistry::global().get(other)->make_builder(builder_config())->build(0, common);
  forward_fails(*foreign, "metadata was built by " + other, GetParam());

  const AttentionSpec good = spec;
  const auto refuses = [&](const std::string& part, auto&& change) {
    change(spec);
    const AttentionMetadataPtr metadata = build();
    spec = good;
    forward_fails(*metadata, part);
  };
  refuses("metadata was built for num_heads = 8, this layer has 4",
          [](AttentionSpec& s) { s.num_heads = 8; });
  refuses("num_kv_heads = 4", [](AttentionSpec& s) { s.num_kv_heads = 4; });
  refuses("head_size = 32", [](AttentionSpec& s) { s.head_size = 32; });
  refuses("head_size_v = 8", [](AttentionSpec& s) { s.head_size_v = 8; });
  refuses("dtype = f16", [](AttentionSpec& s) { s.dtype = DType::f16; });
  refuses("kv_cache_dtype = f8e4m3", [](AttentionSpec& s) { s.kv_cache_dtype = DType::f8e4m3; });
  refuses("window.left = 7", [](AttentionSpec& s) { s.window = Window::of_tokens(8); });
}

TEST_P(Failure, CascadeMetadataForALayerThatCannot) {
  seq_lens = {32, 17, 0};
  common.max_seq_len = 32;
  block_table = {1, 2, 1, 3, 0, 0};
  const AttentionMetadataPtr cascade = build(16);
  spec.alibi_slopes.assign(kHeads, 0.5F);
  forward_fails(*cascade, "cascade", "ALiBi");
}

TEST_P(Failure, UpdateBlockTableChecksToo) {
  const auto builder = backend()->make_builder(builder_config());
  const AttentionMetadataPtr metadata = builder->build(0, common);
  std::vector<std::int32_t> other{3, 9, 4, 3, 0, 0};
  const TensorView table(other.data(), DType::i32, {3, 2});
  expect_error(
      kInvalid, [&] { builder->update_block_table(*metadata, table, common.slot_mapping); },
      "names block 9");
  other[1] = 5;
  EXPECT_EQ(builder->update_block_table(*metadata, table, common.slot_mapping)
                ->common()
                .block_table.data(),
            other.data());
}

TEST_P(Failure, GraphCaptureWithoutSupport) {
  const auto builder = backend()->make_builder(builder_config());
  EXPECT_EQ(builder->graph_support(), GraphSupport::never);
  expect_error(
      ErrorCode::unsupported, [&] { builder->build_for_graph_capture(common); },
      "graph support 'never'");
}

TEST_P(Failure, Workspace) {
  const AttentionMetadataPtr metadata = build();
  if (metadata->workspace_bytes() == 0) {
    GTEST_SKIP() << GetParam() << " needs no workspace";
  }
  std::vector<std::byte> small(64);
  ExecutionContext context;
  context.workspace = {nullptr, DType::u8, {metadata->workspace_bytes()}};
  expect_error(
      kInvalid, [&] { backend()->make_impl(spec)->forward(args, *metadata, context); },
      "null data pointer");
  context.workspace = {small.data(), DType::u8, {1}};
  expect_error(
      kInvalid, [&] { backend()->make_impl(spec)->forward(args, *metadata, context); },
      "context.workspace", "workspace_bytes()");
}

TEST_P(Failure, MergeShapes) {
  std::vector<float> lse_b(lse.size());
  const AttentionPart a{args.output, args.lse};
  const AttentionPart b{args.query, {lse_b.data(), DType::f32, {kHeads, kTokens}}};
  merge_attn_states(a, b, b);
  expect_error(
      kInvalid,
      [&] {
        merge_attn_states(a, {args.query.slice(0, 0, 5), b.lse}, b);
      },
      "a.output is f32[5, 4, 16]");
  expect_error(
      kInvalid,
      [&] {
        merge_attn_states(a, b, {args.query, b.lse.slice(1, 0, 5)});
      },
      "b.lse is f32[4, 5]");
  expect_error(
      kInvalid,
      [&] {
        merge_attn_states(a, b, {args.query, {}});
      },
      "b.lse is absent");
  expect_error(
      kInvalid, [&] { merge_attn_states({}, a, b); }, "result.output is absent");
}

TEST_P(Failure, ReshapeAndCacheArguments) {
  const KVCacheView& cache = args.kv_cache;
  expect_error(
      kInvalid,
      [&] { reshape_and_cache(new_key, new_value.slice(1, 0, 1), cache, common.slot_mapping); },
      "value");
  expect_error(
      kInvalid,
      [&] {
        reshape_and_cache({new_keys.data(), DType::f16, {6, 2, 16}}, new_value, cache,
                          common.slot_mapping);
      },
      "kv_cache.key is f32", "f16");
  expect_error(
      kInvalid,
      [&] {
        reshape_and_cache(new_key, new_value, cache, common.slot_mapping, {1.0F, -1.0F, 1.0F});
      },
      "k = -1");
  // All on one device, but not on the backend's.
  const auto on_gpu = [](const TensorView& t) {
    return TensorView(t.data(), t.dtype(), t.shape(), t.strides(), Device{DeviceType::cuda, 0});
  };
  expect_error(
      kInvalid,
      [&] {
        backend()->make_impl(spec)->update_kv_cache(on_gpu(new_key), on_gpu(new_value),
                                                    {on_gpu(cache.key), on_gpu(cache.value)},
                                                    on_gpu(common.slot_mapping), {});
      },
      "on cuda:0, it must be on cpu");
  EXPECT_EQ(std::count(key_cache.begin(), key_cache.end(), kCached), std::ssize(key_cache));
}

INSTANTIATE_TEST_SUITE_P(Backends, Failure, ::testing::Values("CPU_ATTN", "REFERENCE"),
                         [](const auto& info) { return info.param; });

class MlaFailure : public ::testing::TestWithParam<std::string> {};

TEST_P(MlaFailure, NeitherWayTakesTheOthersMetadata) {
  AttentionSpec spec;
  spec.num_heads = 2;
  spec.num_kv_heads = 1;
  spec.mla = MlaDims{16, 8, 4, 8};
  spec.head_size = 20;
  spec.head_size_v = 16;
  spec.scale = 0.3F;
  spec.dtype = DType::f32;
  const AttentionBackendPtr backend = BackendRegistry::global().get(GetParam());
  const auto impl = backend->make_mla_impl(spec);
  BuilderConfig config;
  config.spec = spec;
  config.num_blocks = 2;
  const auto builder = backend->make_builder(config);

  std::vector<std::int32_t> starts{0, 2};
  std::vector<std::int32_t> lens{2};
  std::vector<std::int32_t> table{1};
  std::vector<float> memory(4096, 0.0F);
  CommonAttentionMetadata common;
  common.num_reqs = 1;
  common.num_actual_tokens = common.max_query_len = common.max_seq_len = 2;
  common.query_start_loc = {starts.data(), DType::i32, {2}};
  common.seq_lens = {lens.data(), DType::i32, {1}};
  const AttentionMetadataPtr plain = builder->build(0, common);
  common.block_table = {table.data(), DType::i32, {1, 1}};
  const AttentionMetadataPtr paged = builder->build(0, common);

  MlaDecodeArgs decode;
  decode.query = {memory.data(), DType::f32, {2, 2, 20}};
  decode.kv_cache = {memory.data(), DType::f32, {2, 16, 20}};
  decode.output = {memory.data() + 2048, DType::f32, {2, 2, 16}};
  impl->forward_mqa(decode, *paged);
  expect_error(
      kInvalid, [&] { impl->forward_mqa(decode, *plain); },
      "forward_mqa reads the paged latent cache");
  decode.query = {memory.data(), DType::f32, {2, 2, 12}};
  expect_error(
      kInvalid, [&] { impl->forward_mqa(decode, *paged); }, "query is f32[2, 2, 12]");

  MlaPrefillArgs prefill;
  prefill.query = {memory.data(), DType::f32, {2, 2, 12}};
  prefill.key = {memory.data(), DType::f32, {2, 2, 12}};
  prefill.value = {memory.data(), DType::f32, {2, 2, 8}};
  prefill.output = {memory.data() + 2048, DType::f32, {2, 2, 8}};
  impl->forward_mha(prefill, *plain);
  expect_error(
      kInvalid, [&] { impl->forward_mha(prefill, *paged); }, "forward_mha reads plain keys");
  AttentionSpec plain_spec = spec;
  plain_spec.mla.reset();
  expect_error(
      ErrorCode::unsupported, [&] { backend->make_mla_impl(plain_spec); }, "only MLA is supported");
  expect_error(
      ErrorCode::unsupported, [&] { BackendRegistry::global().get("REFERENCE")->make_impl(spec); },
      "MLA is not supported");
}

INSTANTIATE_TEST_SUITE_P(Backends, MlaFailure, ::testing::Values("CPU_MLA", "REFERENCE_MLA"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace foveal
