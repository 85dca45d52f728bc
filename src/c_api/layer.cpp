// Layers, and the operations beside attention.
#include <memory>

#include "c_api/convert.h"
#include "c_api/errors.h"
#include "c_api/handles.h"
#include "foveal/kernels.h"
#include "foveal/ops.h"

using namespace foveal;
using namespace foveal::c_api;

namespace {

const AttentionImpl& plain_layer(const foveal_layer* layer, std::string_view function,
                                 std::string_view instead) {
  if (require("layer", layer).impl == nullptr) {
    fail(ErrorCode::unsupported, "layer is an MLA layer, {} serves others: call {}", function,
         instead);
  }
  return *layer->impl;
}

const MlaAttentionImpl& mla_layer(const foveal_layer* layer, std::string_view function,
                                  std::string_view instead) {
  if (require("layer", layer).mla == nullptr) {
    fail(ErrorCode::unsupported, "layer is not an MLA layer, {} serves those only: call {}",
         function, instead);
  }
  return *layer->mla;
}

const AttentionMetadata& plan(const foveal_metadata* metadata) {
  return *require("metadata", metadata).metadata;
}

}  // namespace

foveal_status foveal_backend_make_layer(const foveal_backend* backend, const foveal_spec* spec,
                                        foveal_layer** out) {
  return guarded([&] {
    const AttentionBackendPtr& made_by = require("backend", backend).backend;
    require("out", out);
    const AttentionSpec layer_spec = to_spec("spec", spec);
    auto layer = std::make_unique<foveal_layer>();
    layer->backend = made_by;
    if (layer_spec.mla) {
      layer->mla = made_by->make_mla_impl(layer_spec);
    } else {
      layer->impl = made_by->make_impl(layer_spec);
    }
    *out = layer.release();
  });
}

void foveal_layer_destroy(foveal_layer* layer) { delete layer; }

bool foveal_layer_is_mla(const foveal_layer* layer) {
  return layer != nullptr && layer->mla != nullptr;
}

foveal_status foveal_layer_update_kv_cache(const foveal_layer* layer, const DLTensor* key,
                                           const DLTensor* value, const DLTensor* key_cache,
                                           const DLTensor* value_cache,
                                           const DLTensor* slot_mapping,
                                           const foveal_context* context) {
  return guarded([&] {
    plain_layer(layer, "foveal_layer_update_kv_cache", "foveal_layer_update_mla_kv_cache")
        .update_kv_cache(to_tensor("key", key), to_tensor("value", value),
                         to_kv_cache(key_cache, value_cache),
                         to_tensor("slot_mapping", slot_mapping), to_context(context));
  });
}

foveal_status foveal_layer_forward(const foveal_layer* layer, const foveal_forward_args* args,
                                   const foveal_metadata* metadata, const foveal_context* context) {
  return guarded([&] {
    const AttentionImpl& impl =
        plain_layer(layer, "foveal_layer_forward",
                    "foveal_layer_forward_mha (prefill) or foveal_layer_forward_mqa (decode)");
    const foveal_forward_args c = read_struct("args", args);
    impl.forward({.query = to_tensor("query", c.query),
                  .key = to_tensor("key", c.key),
                  .value = to_tensor("value", c.value),
                  .kv_cache = to_kv_cache(c.key_cache, c.value_cache),
                  .output = to_tensor("output", c.output),
                  .lse = to_tensor("lse", c.lse)},
                 plan(metadata), to_context(context));
  });
}

foveal_status foveal_layer_update_mla_kv_cache(const foveal_layer* layer, const DLTensor* latent,
                                               const DLTensor* key_rope, const DLTensor* kv_cache,
                                               const DLTensor* slot_mapping,
                                               const foveal_context* context) {
  return guarded([&] {
    mla_layer(layer, "foveal_layer_update_mla_kv_cache", "foveal_layer_update_kv_cache")
        .update_kv_cache(to_tensor("latent", latent), to_tensor("key_rope", key_rope),
                         to_tensor("kv_cache", kv_cache), to_tensor("slot_mapping", slot_mapping),
                         to_context(context));
  });
}

foveal_status foveal_layer_forward_mha(const foveal_layer* layer,
                                       const foveal_mla_prefill_args* args,
                                       const foveal_metadata* metadata,
                                       const foveal_context* context) {
  return guarded([&] {
    const MlaAttentionImpl& impl =
        mla_layer(layer, "foveal_layer_forward_mha", "foveal_layer_forward");
    const foveal_mla_prefill_args c = read_struct("args", args);
    impl.forward_mha({.query = to_tensor("query", c.query),
                      .key = to_tensor("key", c.key),
                      .value = to_tensor("value", c.value),
                      .output = to_tensor("output", c.output),
                      .lse = to_tensor("lse", c.lse)},
                     plan(metadata), to_context(context));
  });
}

foveal_status foveal_layer_forward_mqa(const foveal_layer* layer,
                                       const foveal_mla_decode_args* args,
                                       const foveal_metadata* metadata,
                                       const foveal_context* context) {
  return guarded([&] {
    const MlaAttentionImpl& impl =
        mla_layer(layer, "foveal_layer_forward_mqa", "foveal_layer_forward");
    const foveal_mla_decode_args c = read_struct("args", args);
    impl.forward_mqa({.query = to_tensor("query", c.query),
                      .kv_cache = to_tensor("kv_cache", c.kv_cache),
                      .output = to_tensor("output", c.output),
                      .lse = to_tensor("lse", c.lse)},
                     plan(metadata), to_context(context));
  });
}

foveal_status foveal_merge_attn_states(const DLTensor* output, const DLTensor* lse,
                                       const DLTensor* a_output, const DLTensor* a_lse,
                                       const DLTensor* b_output, const DLTensor* b_lse,
                                       const foveal_context* context) {
  return guarded([&] {
    merge_attn_states({to_tensor("output", output), to_tensor("lse", lse)},
                      {to_tensor("a_output", a_output), to_tensor("a_lse", a_lse)},
                      {to_tensor("b_output", b_output), to_tensor("b_lse", b_lse)},
                      to_context(context));
  });
}

foveal_status foveal_reshape_and_cache(const DLTensor* key, const DLTensor* value,
                                       const DLTensor* key_cache, const DLTensor* value_cache,
                                       const DLTensor* slot_mapping, float k_scale, float v_scale,
                                       const foveal_context* context) {
  return guarded([&] {
    reshape_and_cache(to_tensor("key", key), to_tensor("value", value),
                      to_kv_cache(key_cache, value_cache), to_tensor("slot_mapping", slot_mapping),
                      {.k = k_scale, .v = v_scale}, to_context(context));
  });
}

foveal_status foveal_load_kernel_pack(const char* path) {
  return guarded([&] { load_kernel_pack(&require("path", path)); });
}
