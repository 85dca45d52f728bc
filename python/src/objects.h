#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "tensor.h"

// The classes of the module, over the C interface's handles.
namespace foveal::python {

template <typename T, void (*destroy)(T*)>
struct Destroy {
  void operator()(T* handle) const { destroy(handle); }
};
template <typename T, void (*destroy)(T*)>
using Handle = std::unique_ptr<T, Destroy<T, destroy>>;

/// What a layer adds to its scores: float32 [requests, num_heads, rows, keys] of any strides, a
/// dimension with one entry serving all. Only `foveal.attention` makes one, and checks its shape;
/// in a step that goes beyond it scores become NaN.
class ScoreBias {
 public:
  explicit ScoreBias(nb::handle array);
  /// A foveal_score_mod, with the ScoreBias as user_data.
  static float add(float score, const foveal_score_index* index, void* bias);

 private:
  std::unique_ptr<Tensor> array_;
  const float* data_ = nullptr;
  std::int64_t sizes_[4] = {};
  std::int64_t strides_[4] = {};
};

/// A foveal_spec and the memory it points at.
class Spec {
 public:
  explicit Spec(const nb::kwargs& members);
  const foveal_spec* get() const { return &c_; }
  const std::shared_ptr<ScoreBias>& score_bias() const { return score_bias_; }
  std::string describe() const;

 private:
  foveal_spec c_{};
  foveal_mla_dims mla_{};
  std::vector<float> alibi_slopes_;
  std::vector<float> sinks_;
  std::string kv_sharing_target_;
  std::shared_ptr<ScoreBias> score_bias_;
};

struct Selection {
  Handle<foveal_selection, foveal_selection_destroy> handle;
};

struct Backend {
  Handle<foveal_backend, foveal_backend_destroy> handle;
};

/// Its scratch serves one call at a time: the mutex keeps the caller's threads apart.
struct BuilderState {
  Handle<foveal_builder, foveal_builder_destroy> handle;
  std::mutex mutex;
};

struct Builder {
  std::shared_ptr<BuilderState> state;
};

/// The step's tensors: copied where they are on the CPU, so that nothing the caller does to them
/// after build() reaches the plan, and held where they are on a device.
struct Metadata {
  Metadata() = default;
  Metadata(const Metadata&) = delete;
  Metadata& operator=(const Metadata&) = delete;

  std::vector<std::unique_ptr<std::int64_t[]>> copies;
  std::vector<std::unique_ptr<Tensor>> held;
  std::shared_ptr<BuilderState> builder;
  Handle<foveal_metadata, foveal_metadata_destroy> handle;
};

/// Views of a cache's memory, made once; `value` is unused for MLA.
struct KVCache {
  KVCache() = default;
  KVCache(nb::handle key_cache, nb::handle value_cache);
  KVCache(const KVCache&) = delete;  // The views point into themselves.
  KVCache& operator=(const KVCache&) = delete;

  std::vector<std::unique_ptr<Tensor>> held;
  foveal_tensor key{};
  foveal_tensor value{};
  bool has_value = false;
};

struct Layer {
  std::shared_ptr<ScoreBias> score_bias;  ///< Null, or what the layer points at.
  Handle<foveal_layer, foveal_layer_destroy> handle;
};
struct MlaLayer {
  Handle<foveal_layer, foveal_layer_destroy> handle;
};

void bind_selection(nb::module_& module);
void bind_steps(nb::module_& module);
void bind_layers(nb::module_& module);

}  // namespace foveal::python
