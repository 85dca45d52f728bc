// Tensors, and how KV caches lie in memory.
#include <algorithm>
#include <span>
#include <vector>

#include "c_api/convert.h"
#include "c_api/errors.h"
#include "c_api/handles.h"

using namespace foveal;
using namespace foveal::c_api;

foveal_status foveal_tensor_init(foveal_tensor* out, void* data, int32_t dtype, DLDevice device,
                                 int32_t ndim, const int64_t* shape, const int64_t* strides) {
  return guarded([&] {
    require("out", out);
    check(ndim >= 0 && ndim <= FOVEAL_MAX_DIMS, "ndim is {}, it must be in [0, {}]", ndim,
          static_cast<int>(FOVEAL_MAX_DIMS));
    check(ndim == 0 || shape != nullptr, "shape is NULL, it must have ndim = {} sizes", ndim);
    const std::span<const std::int64_t> sizes(shape, static_cast<std::size_t>(ndim));
    const DType type = to_dtype("dtype", dtype);
    const Device where = to_device("device", device);
    write_tensor(*out, strides == nullptr
                           ? TensorView(data, type, sizes, where)
                           : TensorView(data, type, sizes, {strides, sizes.size()}, where));
  });
}

foveal_status foveal_backend_kv_cache_layout(const foveal_backend* backend, const foveal_spec* spec,
                                             int64_t block_size, int64_t num_blocks, int32_t order,
                                             foveal_kv_cache_layout* out) {
  return guarded([&] {
    const AttentionBackend& made_by = *require("backend", backend).backend;
    const KVCacheSpec cache = KVCacheSpec::from(to_spec("spec", spec), block_size);
    const KVCacheLayout layout =
        made_by.kv_cache_layout(cache, num_blocks, to_enum("order", order, KVCacheOrder::hnd));
    const TensorView view = layout.view(nullptr);
    foveal_kv_cache_layout result{};
    result.dtype = from_dtype(layout.dtype);
    result.ndim = view.ndim();
    std::copy(layout.shape.begin(), layout.shape.end(), result.shape);
    std::copy(layout.stride_order.begin(), layout.stride_order.end(), result.stride_order);
    std::copy(view.strides().begin(), view.strides().end(), result.strides);
    result.size_bytes = layout.size_bytes();
    write_struct("out", out, result);
  });
}

foveal_status foveal_backend_kv_cache_views(const foveal_backend* backend, const foveal_spec* spec,
                                            int64_t block_size, const DLTensor* cache,
                                            foveal_tensor* key_cache, foveal_tensor* value_cache) {
  return guarded([&] {
    const AttentionBackend& made_by = *require("backend", backend).backend;
    require("cache", cache);
    require("key_cache", key_cache);
    require("value_cache", value_cache);
    const KVCacheView views = made_by.kv_cache_view(
        to_tensor("cache", cache), KVCacheSpec::from(to_spec("spec", spec), block_size));
    write_tensor(*key_cache, views.key);
    write_tensor(*value_cache, views.value);
  });
}

foveal_status foveal_kv_cache_page_size_bytes(const foveal_spec* spec, int64_t block_size,
                                              int64_t* out) {
  return guarded([&] {
    require("out", out) = KVCacheSpec::from(to_spec("spec", spec), block_size).page_size_bytes();
  });
}

foveal_status foveal_kv_cache_max_blocks_per_request(const foveal_spec* spec, int64_t block_size,
                                                     int64_t max_seq_len,
                                                     int64_t max_tokens_per_step, int64_t* out) {
  return guarded([&] {
    require("out", out) = KVCacheSpec::from(to_spec("spec", spec), block_size)
                              .max_blocks_per_request(max_seq_len, max_tokens_per_step);
  });
}

foveal_status foveal_backend_preferred_block_size(const foveal_backend* backend, int64_t wanted,
                                                  int64_t* out) {
  return guarded([&] {
    require("out", out) = preferred_block_size(*require("backend", backend).backend, wanted);
  });
}

foveal_status foveal_select_kernel_block_size(int64_t manager_block_size,
                                              const foveal_backend* const* backends,
                                              int64_t num_backends, int64_t* out) {
  return guarded([&] {
    require("out", out);
    check(num_backends >= 0 && (num_backends == 0 || backends != nullptr),
          "backends is {} and num_backends {}, it must be an array of that length",
          backends == nullptr ? "NULL" : "given", num_backends);
    std::vector<AttentionBackendPtr> all;
    for (std::int64_t i = 0; i < num_backends; ++i) {
      all.push_back(require("backends[i]", backends[i]).backend);
    }
    *out = select_kernel_block_size(manager_block_size, all);
  });
}
