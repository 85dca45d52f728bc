// The calls of every layer in every step: what they cost beside the C call is measured by
// python/tests/bench_overhead.py.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "arguments.h"
#include "foveal/dlpack.h"
#include "objects.h"

namespace foveal::python {
namespace {

foveal_context context_of(const CallStream& stream) {
  foveal_context context{};
  context.struct_size = sizeof context;
  context.stream = stream.get();
  return context;
}

Metadata& to_metadata(nb::handle value) {
  return to_instance<Metadata>("metadata", value, "Metadata");
}

KVCache& to_kv_cache(nb::handle value, bool mla) {
  auto& cache = to_instance<KVCache>("kv_cache", value, "KVCache");
  if (cache.has_value == mla) {
    raise(PyExc_ValueError, mla ? "kv_cache has keys and values, an MLA layer needs KVCache(cache)"
                                : "kv_cache is one of an MLA layer, this layer needs keys and "
                                  "values: backend.kv_cache(spec, cache) or KVCache(key, value)");
  }
  return cache;
}

/// A C call without Python's lock. A builder's scratch serves one call at a time.
template <typename Call>
void run(Metadata* metadata, Call&& call) {
  foveal_status status = FOVEAL_OK;
  {
    const nb::gil_scoped_release release;
    if (metadata != nullptr) {
      const std::lock_guard lock(metadata->builder->mutex);
      status = call();
    } else {
      status = call();
    }
  }
  check(status);
}

void update_kv_cache(const Layer& layer, nb::handle key, nb::handle value, nb::handle kv_cache,
                     nb::handle slot_mapping, nb::handle stream_argument) {
  CallStream stream(stream_argument);
  const KVCache& cache = to_kv_cache(kv_cache, false);
  const Tensor k("key", key, Access::kRead, stream);
  const Tensor v("value", value, Access::kRead, stream);
  const Tensor slots("slot_mapping", slot_mapping, Access::kRead, stream);
  const foveal_context context = context_of(stream);
  run(nullptr, [&] {
    return foveal_layer_update_kv_cache(layer.handle.get(), k, v, &cache.key.tensor,
                                        &cache.value.tensor, slots, &context);
  });
}

nb::object forward(const Layer& layer, nb::handle query, nb::handle kv, nb::handle metadata,
                   nb::handle output, nb::handle lse, nb::handle stream_argument) {
  CallStream stream(stream_argument);
  Metadata& plan = to_metadata(metadata);
  foveal_forward_args args{};
  args.struct_size = sizeof args;
  const bool plain = PyTuple_Check(kv.ptr()) != 0;
  if (plain && nb::len(kv) != 2) {
    raise(PyExc_ValueError, "kv is a tuple of " + std::to_string(nb::len(kv)) +
                                ", it must be (key, value) or a KVCache");
  }
  const nb::object key = plain ? nb::object(kv[0]) : nb::none();
  const nb::object value = plain ? nb::object(kv[1]) : nb::none();
  const Tensor q("query", query, Access::kRead, stream);
  const Tensor k("key", key, Access::kRead, stream, !plain);
  const Tensor v("value", value, Access::kRead, stream, !plain);
  const Tensor out("output", output, Access::kWrite, stream);
  const Tensor sums("lse", lse, Access::kWrite, stream, true);
  args.query = q;
  args.key = k;
  args.value = v;
  args.output = out;
  args.lse = sums;
  if (!plain) {
    const KVCache& cache = to_kv_cache(kv, false);
    args.key_cache = &cache.key.tensor;
    args.value_cache = &cache.value.tensor;
  }
  const foveal_context context = context_of(stream);
  run(&plan,
      [&] { return foveal_layer_forward(layer.handle.get(), &args, plan.handle.get(), &context); });
  return nb::borrow(output);
}

/// Seconds of one C call, for python/tests/bench_overhead.py: the same call in a loop.
double time_forward(const Layer& layer, nb::handle query, nb::handle kv_cache, nb::handle metadata,
                    nb::handle output, std::int64_t calls) {
  CallStream stream{nb::none()};
  Metadata& plan = to_metadata(metadata);
  const KVCache& cache = to_kv_cache(kv_cache, false);
  const Tensor q("query", query, Access::kRead, stream);
  const Tensor out("output", output, Access::kWrite, stream);
  foveal_forward_args args{};
  args.struct_size = sizeof args;
  args.query = q;
  args.output = out;
  args.key_cache = &cache.key.tensor;
  args.value_cache = &cache.value.tensor;
  const foveal_context context = context_of(stream);
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < calls; ++i) {
    check(foveal_layer_forward(layer.handle.get(), &args, plan.handle.get(), &context));
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return taken.count() / static_cast<double>(calls);
}

void update_mla_kv_cache(const MlaLayer& layer, nb::handle latent, nb::handle key_rope,
                         nb::handle kv_cache, nb::handle slot_mapping, nb::handle stream_argument) {
  CallStream stream(stream_argument);
  const KVCache& cache = to_kv_cache(kv_cache, true);
  const Tensor l("latent", latent, Access::kRead, stream);
  const Tensor r("key_rope", key_rope, Access::kRead, stream);
  const Tensor slots("slot_mapping", slot_mapping, Access::kRead, stream);
  const foveal_context context = context_of(stream);
  run(nullptr, [&] {
    return foveal_layer_update_mla_kv_cache(layer.handle.get(), l, r, &cache.key.tensor, slots,
                                            &context);
  });
}

nb::object forward_mha(const MlaLayer& layer, nb::handle query, nb::handle key, nb::handle value,
                       nb::handle metadata, nb::handle output, nb::handle lse,
                       nb::handle stream_argument) {
  CallStream stream(stream_argument);
  Metadata& plan = to_metadata(metadata);
  const Tensor q("query", query, Access::kRead, stream);
  const Tensor k("key", key, Access::kRead, stream);
  const Tensor v("value", value, Access::kRead, stream);
  const Tensor out("output", output, Access::kWrite, stream);
  const Tensor sums("lse", lse, Access::kWrite, stream, true);
  const foveal_mla_prefill_args args{sizeof args, q, k, v, out, sums};
  const foveal_context context = context_of(stream);
  run(&plan, [&] {
    return foveal_layer_forward_mha(layer.handle.get(), &args, plan.handle.get(), &context);
  });
  return nb::borrow(output);
}

nb::object forward_mqa(const MlaLayer& layer, nb::handle query, nb::handle kv_cache,
                       nb::handle metadata, nb::handle output, nb::handle lse,
                       nb::handle stream_argument) {
  CallStream stream(stream_argument);
  Metadata& plan = to_metadata(metadata);
  const KVCache& cache = to_kv_cache(kv_cache, true);
  const Tensor q("query", query, Access::kRead, stream);
  const Tensor out("output", output, Access::kWrite, stream);
  const Tensor sums("lse", lse, Access::kWrite, stream, true);
  const foveal_mla_decode_args args{sizeof args, q, &cache.key.tensor, out, sums};
  const foveal_context context = context_of(stream);
  run(&plan, [&] {
    return foveal_layer_forward_mqa(layer.handle.get(), &args, plan.handle.get(), &context);
  });
  return nb::borrow(output);
}

void merge_attn_states(nb::handle output, nb::handle lse, nb::handle a_output, nb::handle a_lse,
                       nb::handle b_output, nb::handle b_lse, nb::handle stream_argument) {
  CallStream stream(stream_argument);
  const Tensor out("out", output, Access::kWrite, stream);
  const Tensor out_lse("out_lse", lse, Access::kWrite, stream, true);
  const Tensor a("a", a_output, Access::kRead, stream);
  const Tensor a_sums("a_lse", a_lse, Access::kRead, stream);
  const Tensor b("b", b_output, Access::kRead, stream);
  const Tensor b_sums("b_lse", b_lse, Access::kRead, stream);
  const foveal_context context = context_of(stream);
  run(nullptr,
      [&] { return foveal_merge_attn_states(out, out_lse, a, a_sums, b, b_sums, &context); });
}

/// (shape, dtype, device, whether the first two dimensions are one stride) of an array.
nb::tuple describe(const char* name, nb::handle array) {
  CallStream stream{nb::none()};
  const Tensor tensor(name, array, Access::kRead, stream);
  const DLTensor& t = *tensor.get();
  nb::list shape;
  for (int i = 0; i < t.ndim; ++i) {
    shape.append(t.shape[i]);
  }
  const char letter = t.dtype.code == kDLFloat  ? 'f'
                      : t.dtype.code == kDLInt  ? 'i'
                      : t.dtype.code == kDLUInt ? 'u'
                                                : '?';
  std::string dtype = letter + std::to_string(t.dtype.bits);
  if (t.dtype.code == kDLBfloat) {
    dtype = "bf16";
  } else if (t.dtype.bits == 8 && letter == '?') {
    dtype = t.dtype.code == kDLPackFloat8E4M3FN ? "f8e4m3"
            : t.dtype.code == kDLPackFloat8E5M2 ? "f8e5m2"
                                                : "code " + std::to_string(t.dtype.code);
  }
  const bool cuda = t.device.device_type == kDLCUDA || t.device.device_type == kDLCUDAManaged;
  const bool joined = t.ndim < 2 || t.strides == nullptr || t.shape[0] <= 1 || t.shape[1] == 1 ||
                      t.strides[0] == t.strides[1] * t.shape[1];
  return nb::make_tuple(nb::tuple(shape), dtype,
                        cuda ? "cuda:" + std::to_string(t.device.device_id) : std::string("cpu"),
                        joined, reinterpret_cast<std::uintptr_t>(stream.get()));
}

}  // namespace

KVCache::KVCache(nb::handle key_cache, nb::handle value_cache) : KVCache() {
  CallStream stream{nb::none()};
  const auto take = [&](const char* name, nb::handle array, foveal_tensor& view) {
    auto tensor = std::make_unique<Tensor>(name, array, Access::kWrite, stream,
                                           /*optional=*/false, /*hold=*/true);
    const DLTensor& t = *tensor->get();
    if (t.ndim > FOVEAL_MAX_DIMS) {
      raise(PyExc_ValueError, std::string(name) + " has more than 8 dimensions");
    }
    view.tensor = t;
    std::copy(t.shape, t.shape + t.ndim, view.shape);
    view.tensor.shape = view.shape;
    if (t.strides != nullptr) {
      std::copy(t.strides, t.strides + t.ndim, view.strides);
      view.tensor.strides = view.strides;
    }
    held.push_back(std::move(tensor));
  };
  has_value = !value_cache.is_none();
  take(has_value ? "key_cache" : "cache", key_cache, key);
  if (has_value) {
    take("value_cache", value_cache, value);
  }
}

void bind_layers(nb::module_& module) {
  nb::class_<KVCache>(
      module, "KVCache",
      "A paged cache as layers take it: KVCache(key_cache, value_cache), [num_blocks, block_size,\n"
      "num_kv_heads, head size] each, of any strides; KVCache(cache) for MLA, [num_blocks,\n"
      "block_size, kv_lora_rank + qk_rope_head_dim]. Made once; keeps the arrays' memory alive.")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("key_cache").none(),
           nb::arg("value_cache") = nb::none(),
           nb::sig(
               "def __init__(self, key_cache: Array, value_cache: Array | None = None) -> None"));
  nb::class_<Layer>(module, "Layer", "Attention of one layer, of Backend.make_layer.")
      .def(
          "update_kv_cache", &update_kv_cache, nb::arg("key").none(), nb::arg("value").none(),
          nb::arg("kv_cache").none(), nb::arg("slot_mapping").none(),
          nb::arg("stream") = nb::none(),
          nb::sig("def update_kv_cache(self, key: Array, value: Array, kv_cache: KVCache, "
                  "slot_mapping: Array, stream: Stream = None) -> None"),
          "Writes new keys [T, num_kv_heads, head_size] and values [T, num_kv_heads, head_size_v]\n"
          "into the cache at slot_mapping, int64 [<= T]; -1 is skipped.")
      .def(
          "forward", &forward, nb::arg("query").none(), nb::arg("kv").none(),
          nb::arg("metadata").none(), nb::arg("output").none(), nb::arg("lse") = nb::none(),
          nb::arg("stream") = nb::none(),
          nb::sig("def forward(self, query: Array, kv: KVCache | tuple[Array, Array], metadata: "
                  "Metadata, output: Array, lse: Array | None = None, stream: Stream = None) -> "
                  "Array"),
          "Writes output [T, num_heads, head_size_v], and lse float32 [num_heads, T] where given,\n"
          "for query [T, num_heads, head_size]; returns output.\n\n"
          "kv: the paged cache, or plain (key, value), [keys, num_kv_heads, head size] each, "
          "where\n"
          "the metadata has no block_table. stream: a CUDA stream; by default the current one of\n"
          "the query's framework.");
  nb::class_<MlaLayer>(module, "MlaLayer",
                       "Attention of one MLA layer, of Backend.make_layer. L = kv_lora_rank, R =\n"
                       "qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim.")
      .def("update_kv_cache", &update_mla_kv_cache, nb::arg("latent").none(),
           nb::arg("key_rope").none(), nb::arg("kv_cache").none(), nb::arg("slot_mapping").none(),
           nb::arg("stream") = nb::none(),
           nb::sig("def update_kv_cache(self, latent: Array, key_rope: Array, kv_cache: KVCache, "
                   "slot_mapping: Array, stream: Stream = None) -> None"),
           "Writes latents [T, L] and rotated keys [T, R] at slot_mapping, int64 [<= T].")
      .def("forward_mha", &forward_mha, nb::arg("query").none(), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("metadata").none(), nb::arg("output").none(),
           nb::arg("lse") = nb::none(), nb::arg("stream") = nb::none(),
           nb::sig("def forward_mha(self, query: Array, key: Array, value: Array, metadata: "
                   "Metadata, output: Array, lse: Array | None = None, stream: Stream = None) -> "
                   "Array"),
           "Prefill: query [T, num_heads, P + R], key [keys, num_heads, P + R], value [keys,\n"
           "num_heads, V] to output [T, num_heads, V]; the metadata has no block_table.")
      .def(
          "forward_mqa", &forward_mqa, nb::arg("query").none(), nb::arg("kv_cache").none(),
          nb::arg("metadata").none(), nb::arg("output").none(), nb::arg("lse") = nb::none(),
          nb::arg("stream") = nb::none(),
          nb::sig("def forward_mqa(self, query: Array, kv_cache: KVCache, metadata: Metadata, "
                  "output: Array, lse: Array | None = None, stream: Stream = None) -> Array"),
          "Decode: query [T, num_heads, L + R] over the latent cache to output [T, num_heads, L].");
  nb::cpp_function_def(
      [](const Backend& backend, nb::handle spec) -> nb::object {
        foveal_layer* layer = nullptr;
        const Spec& wanted = to_instance<Spec>("spec", spec, "Spec");
        check(foveal_backend_make_layer(backend.handle.get(), wanted.get(), &layer));
        if (foveal_layer_is_mla(layer)) {
          return nb::cast(MlaLayer{decltype(MlaLayer::handle)(layer)});
        }
        return nb::cast(Layer{wanted.score_bias(), decltype(Layer::handle)(layer)});
      },
      nb::scope(module.attr("Backend")), nb::name("make_layer"), nb::is_method(),
      nb::arg("spec").none(), nb::sig("def make_layer(self, spec: Spec) -> Layer | MlaLayer"),
      "What attends in one layer: an MlaLayer where the spec has mla.");
  module.def("_merge_attn_states", &merge_attn_states, nb::arg("output").none(),
             nb::arg("lse").none(), nb::arg("a_output").none(), nb::arg("a_lse").none(),
             nb::arg("b_output").none(), nb::arg("b_lse").none(), nb::arg("stream").none());
  module.def("_time_forward", &time_forward);
  module.def("_describe", &describe, nb::arg("name"), nb::arg("array").none());
}

}  // namespace foveal::python
