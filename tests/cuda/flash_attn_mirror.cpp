#include "cuda/flash_attn_mirror.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "core/builtin_backends.h"
#include "cuda/driver.h"
#include "foveal/registry.h"

namespace foveal::tests {
namespace {

constexpr const char* kName = "FLASH_ATTN_MIRROR";
constexpr Device kGpu{DeviceType::cuda, 0};

const AttentionBackendPtr& flash() {
  static const AttentionBackendPtr backend = BackendRegistry::global().get("FLASH_ATTN");
  return backend;
}

/// Copies on the device of the memory that some views span. Views that share memory share a copy.
class Mirror {
 public:
  explicit Mirror(const std::vector<TensorView>& views) {
    for (const TensorView& view : views) {
      if (!view.empty() && view.numel() > 0) {
        add(span_of(view));
      }
    }
    const cuda::ContextGuard guard(0);
    for (Piece& piece : pieces_) {
      // The same place within 256 bytes, since alignment decides between kernels; and a canary's
      // width of nothing before and behind.
      const std::size_t shift = piece.begin % 256;
      piece.buffer = cuda::DeviceBuffer(0, piece.bytes() + shift + 512);
      piece.device = reinterpret_cast<std::uintptr_t>(piece.buffer.data()) + shift;
      cuda::copy_async(reinterpret_cast<void*>(piece.device),
                       reinterpret_cast<const void*>(piece.begin), piece.bytes(), nullptr);
    }
    cuda::synchronize(nullptr);
  }

  TensorView operator()(const TensorView& view) const {
    if (view.empty()) {
      return {};
    }
    void* data = nullptr;
    if (view.numel() > 0) {
      const std::uintptr_t begin = span_of(view).begin;
      for (const Piece& piece : pieces_) {
        if (begin >= piece.begin && begin < piece.end) {
          data = reinterpret_cast<void*>(
              piece.device + (reinterpret_cast<std::uintptr_t>(view.data()) - piece.begin));
        }
      }
    }
    return {data, view.dtype(), view.shape(), view.strides(), kGpu};
  }

  void copy_back() const {
    const cuda::ContextGuard guard(0);
    for (const Piece& piece : pieces_) {
      cuda::copy_async(reinterpret_cast<void*>(piece.begin),
                       reinterpret_cast<const void*>(piece.device), piece.bytes(), nullptr);
    }
    cuda::synchronize(nullptr);
  }

 private:
  struct Piece {
    std::uintptr_t begin;
    std::uintptr_t end;
    std::uintptr_t device = 0;
    cuda::DeviceBuffer buffer{};
    std::size_t bytes() const { return end - begin; }
  };

  static Piece span_of(const TensorView& view) {
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (int d = 0; d < view.ndim(); ++d) {
      const std::int64_t reach = (view.size(d) - 1) * view.stride(d);
      (reach < 0 ? low : high) += reach;
    }
    const auto data = reinterpret_cast<std::uintptr_t>(view.data());
    const std::int64_t element = size_of(view.dtype());
    return {.begin = data + static_cast<std::uintptr_t>(low * element),
            .end = data + static_cast<std::uintptr_t>((high + 1) * element)};
  }

  void add(Piece piece) {
    for (auto other = pieces_.begin(); other != pieces_.end();) {
      if (other->begin < piece.end && piece.begin < other->end) {
        piece.begin = std::min(piece.begin, other->begin);
        piece.end = std::max(piece.end, other->end);
        other = pieces_.erase(other);
      } else {
        ++other;
      }
    }
    pieces_.push_back(std::move(piece));
  }

  std::vector<Piece> pieces_;
};

class MirrorMetadata final : public AttentionMetadata {
 public:
  MirrorMetadata(const BuilderConfig& config, const CommonAttentionMetadata& common,
                 std::int64_t prefix)
      : AttentionMetadata(kName, config, common, prefix),
        mirror({common.query_start_loc, common.seq_lens, common.block_table, common.slot_mapping,
                common.key_start_loc}) {}

  CommonAttentionMetadata on_device() const {
    CommonAttentionMetadata common = this->common();
    common.query_start_loc_host = common.query_start_loc;
    common.seq_lens_host = common.seq_lens;
    for (TensorView* view : {&common.query_start_loc, &common.seq_lens, &common.block_table,
                             &common.slot_mapping, &common.key_start_loc}) {
      *view = mirror(*view);
    }
    return common;
  }

  Mirror mirror;
  AttentionMetadataPtr inner;
};

class MirrorBuilder final : public AttentionMetadataBuilder {
 public:
  explicit MirrorBuilder(const BuilderConfig& config) : AttentionMetadataBuilder(kName, config) {
    BuilderConfig on_device = config;
    on_device.device = kGpu;
    if (const char* version = std::getenv("FOVEAL_TEST_FLASH_ATTN_VERSION")) {
      on_device.flash_attn_version = std::atoi(version);
    }
    inner_ = flash()->make_builder(on_device);
  }

 private:
  AttentionMetadataPtr do_build(std::int64_t prefix, const CommonAttentionMetadata& common,
                                bool fast_build) override {
    auto metadata = std::make_shared<MirrorMetadata>(config(), common, prefix);
    metadata->inner = inner_->build(prefix, metadata->on_device(), fast_build);
    return metadata;
  }

  std::unique_ptr<AttentionMetadataBuilder> inner_;
};

KVCacheView mirrored(const KVCacheView& cache, const Mirror& mirror) {
  return {mirror(cache.key), mirror(cache.value)};
}

class MirrorImpl final : public AttentionImpl {
 public:
  explicit MirrorImpl(const AttentionSpec& spec)
      : AttentionImpl(kName, spec), inner_(flash()->make_impl(spec)) {}

 private:
  void do_update_kv_cache(const TensorView& key, const TensorView& value,
                          const KVCacheView& kv_cache, const TensorView& slot_mapping,
                          const ExecutionContext& /*context*/) const override {
    const Mirror mirror({key, value, kv_cache.key, kv_cache.value, slot_mapping});
    inner_->update_kv_cache(mirror(key), mirror(value), mirrored(kv_cache, mirror),
                            mirror(slot_mapping));
    mirror.copy_back();
  }

  void do_forward(const ForwardArgs& args, const AttentionMetadata& metadata,
                  const ExecutionContext& /*context*/) const override {
    const auto& planned = static_cast<const MirrorMetadata&>(metadata);
    const Mirror mirror({args.query, args.key, args.value, args.kv_cache.key, args.kv_cache.value,
                         args.output, args.lse});
    inner_->forward({.query = mirror(args.query),
                     .key = mirror(args.key),
                     .value = mirror(args.value),
                     .kv_cache = mirrored(args.kv_cache, mirror),
                     .output = mirror(args.output),
                     .lse = mirror(args.lse)},
                    *planned.inner);
    mirror.copy_back();
  }

  std::unique_ptr<AttentionImpl> inner_;
};

struct FlashAttnMirror {
  static const char* name() { return kName; }
  static BackendCapabilities capabilities() {
    BackendCapabilities can = flash()->capabilities();
    can.device = DeviceType::cpu;
    can.min_compute_capability = 0;
    can.auto_select = false;
    return can;
  }
  static std::vector<std::string> validate(const SelectorConfig& /*config*/) { return {}; }
  static KVCacheLayout kv_cache_layout(const KVCacheSpec& spec, std::int64_t num_blocks,
                                       KVCacheOrder order) {
    return flash()->kv_cache_layout(spec, num_blocks, order);
  }
  static KVCacheView kv_cache_view(const TensorView& cache, const KVCacheSpec& spec) {
    return flash()->kv_cache_view(cache, spec);
  }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig& config) {
    return std::make_unique<MirrorBuilder>(config);
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec& spec) {
    return std::make_unique<MirrorImpl>(spec);
  }
  static void reshape_and_cache(const TensorView& key, const TensorView& value,
                                const KVCacheView& kv_cache, const TensorView& slot_mapping,
                                const QuantScales& scales, const ExecutionContext& context) {
    const Mirror mirror({key, value, kv_cache.key, kv_cache.value, slot_mapping});
    flash()->reshape_and_cache(mirror(key), mirror(value), mirrored(kv_cache, mirror),
                               mirror(slot_mapping), scales, context);
    mirror.copy_back();
  }
  static void merge_attn_states(const AttentionPart& result, const AttentionPart& a,
                                const AttentionPart& b, const ExecutionContext& context) {
    const Mirror mirror({result.output, result.lse, a.output, a.lse, b.output, b.lse});
    flash()->merge_attn_states({mirror(result.output), mirror(result.lse)},
                               {mirror(a.output), mirror(a.lse)}, {mirror(b.output), mirror(b.lse)},
                               context);
    mirror.copy_back();
  }
};

}  // namespace

void register_flash_attn_mirror() {
  BackendRegistry::global().add(kName, "FLASH_ATTN on copies of the host's tensors",
                                [] { return make_backend<FlashAttnMirror>(); });
}

}  // namespace foveal::tests
