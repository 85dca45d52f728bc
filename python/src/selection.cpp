// Devices, layer specs, and the choice of a backend.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "arguments.h"
#include "objects.h"

namespace foveal::python {
namespace {

const std::vector<const char*> kAttnTypes{"decoder", "encoder", "encoder_only", "encoder_decoder"};
const std::vector<const char*> kGraphSupports{"never", "uniform_single_token_decode",
                                              "uniform_batch", "always"};
const std::vector<const char*> kOrders{"nhd", "hnd"};

/// Keyword arguments taken one by one; what is left over is unknown.
class Keywords {
 public:
  Keywords(const char* function, const nb::kwargs& given) : function_(function), given_(given) {}

  /// The value, or None when it was not given.
  nb::object take(const char* name) {
    names_.push_back(name);
    PyObject* value = PyDict_GetItemString(given_.ptr(), name);
    taken_ += value != nullptr ? 1 : 0;
    return value == nullptr ? nb::none() : nb::borrow(value);
  }

  nb::object require(const char* name) {
    nb::object value = take(name);
    if (value.is_none()) {
      raise(PyExc_TypeError, std::string(function_) + ": " + name + " must be given");
    }
    return value;
  }

  void expect_no_more() const {
    if (taken_ == static_cast<std::size_t>(PyDict_Size(given_.ptr()))) {
      return;
    }
    for (const auto& [key, value] : given_) {
      const auto name = text_of(key);
      if (std::find(names_.begin(), names_.end(), name) == names_.end()) {
        std::string known;
        for (const std::string_view other : names_) {
          known += (known.empty() ? "" : ", ") + std::string(other);
        }
        raise(PyExc_TypeError,
              std::string(function_) + ": " + name + " is unknown; known are " + known);
      }
    }
  }

 private:
  const char* function_;
  const nb::kwargs& given_;
  std::vector<std::string_view> names_;
  std::size_t taken_ = 0;
};

int capability_of(const DLDevice& device) {
  std::int32_t count = 0;
  check(foveal_num_devices(&count));
  foveal_device_info info{};
  info.struct_size = sizeof info;
  for (std::int32_t i = 0; i < count; ++i) {
    check(foveal_get_device(i, &info));
    if (info.device.device_type == device.device_type &&
        info.device.device_id == device.device_id) {
      return info.compute_capability;
    }
  }
  return 0;  // The selector says why no device of the kind serves.
}

/// What select and explain are asked; `backend` holds the text that the config points at.
foveal_selector_config to_config(const Spec& spec, const nb::kwargs& given, std::string& backend) {
  Keywords keywords("select", given);
  const nb::object device_argument = keywords.take("device");
  const DLDevice device =
      device_argument.is_none() ? DLDevice{kDLCPU, 0} : to_device("device", device_argument);
  const auto capability =
      to_optional_int("compute_capability", keywords.take("compute_capability"));
  foveal_selector_config config;
  check(foveal_selector_config_init(
      &config, sizeof config, spec.get(), device.device_type,
      capability ? to_int32("compute_capability", nb::int_(*capability)) : capability_of(device)));
  config.block_size = to_optional_int("block_size", keywords.take("block_size")).value_or(0);
  const auto flag = [&](const char* name, bool& member, bool inverted = false) {
    if (const nb::object value = keywords.take(name); !value.is_none()) {
      member = to_bool(name, value) != inverted;
    }
  };
  flag("causal", config.use_non_causal, true);
  // Encoders are never causal; the wish is for decoders that are not.
  config.use_non_causal = config.use_non_causal && config.attn_type == FOVEAL_DECODER;
  flag("needs_lse", config.needs_lse);
  flag("batch_invariant", config.batch_invariant);
  if (const nb::object value = keywords.take("needs_graphs"); !value.is_none()) {
    config.needs_graphs = to_choice("needs_graphs", value, kGraphSupports);
  }
  config.decode_context_parallel_size =
      to_optional_int("decode_context_parallel_size", keywords.take("decode_context_parallel_size"))
          .value_or(1);
  config.prefill_context_parallel_size =
      to_optional_int("prefill_context_parallel_size",
                      keywords.take("prefill_context_parallel_size"))
          .value_or(1);
  if (const nb::object value = keywords.take("backend"); !value.is_none()) {
    backend = to_string("backend", value);
    config.backend = backend.c_str();
  }
  keywords.expect_no_more();
  return config;
}

nb::list candidates(const Selection& selection) {
  nb::list list;
  for (std::int64_t i = 0; i < foveal_selection_num_candidates(selection.handle.get()); ++i) {
    foveal_candidate candidate{};
    candidate.struct_size = sizeof candidate;
    check(foveal_selection_candidate(selection.handle.get(), i, &candidate));
    nb::dict entry;
    entry["id"] = candidate.id;
    entry["display_name"] = candidate.display_name;
    entry["priority"] = candidate.priority;
    entry["chosen"] = candidate.chosen;
    nb::list reasons;
    for (std::int64_t r = 0; r < candidate.num_reasons; ++r) {
      reasons.append(candidate.reasons[r]);
    }
    entry["reasons"] = reasons;
    list.append(entry);
  }
  return list;
}

nb::list devices() {
  nb::list list;
  std::int32_t count = 0;
  check(foveal_num_devices(&count));
  for (std::int32_t i = 0; i < count; ++i) {
    foveal_device_info info{};
    info.struct_size = sizeof info;
    check(foveal_get_device(i, &info));
    nb::dict entry;
    entry["device"] = info.device.device_type == kDLCPU
                          ? std::string("cpu")
                          : "cuda:" + std::to_string(info.device.device_id);
    entry["name"] = info.name;
    entry["compute_capability"] = info.compute_capability;
    entry["memory_bytes"] = info.memory_bytes;
    list.append(entry);
  }
  return list;
}

const Spec& to_spec(nb::handle spec) { return to_instance<Spec>("spec", spec, "Spec"); }

foveal_kv_cache_layout layout_of(const Backend& backend, nb::handle spec, nb::handle block_size,
                                 nb::handle num_blocks, nb::handle order) {
  foveal_kv_cache_layout layout{};
  layout.struct_size = sizeof layout;
  check(foveal_backend_kv_cache_layout(
      backend.handle.get(), to_spec(spec).get(), to_int("block_size", block_size),
      to_int("num_blocks", num_blocks), to_choice("order", order, kOrders), &layout));
  return layout;
}

}  // namespace

ScoreBias::ScoreBias(nb::handle array) {
  CallStream stream{nb::none()};
  array_ = std::make_unique<Tensor>("bias", array, Access::kRead, stream, /*optional=*/false,
                                    /*hold=*/true);
  const DLTensor& tensor = *array_->get();
  if (!array_->on_cpu() || tensor.ndim != 4 || tensor.dtype.code != kDLFloat ||
      tensor.dtype.bits != 32) {
    raise(PyExc_ValueError, "bias must be float32 of four dimensions on the CPU");
  }
  data_ = reinterpret_cast<const float*>(static_cast<const std::byte*>(tensor.data) +
                                         tensor.byte_offset);
  std::int64_t compact = 1;  // What DLPack leaves out for a compact tensor.
  for (int i = 3; i >= 0; --i) {
    const std::int64_t stride = tensor.strides != nullptr ? tensor.strides[i] : compact;
    strides_[i] = tensor.shape[i] == 1 ? 0 : stride;
    sizes_[i] = tensor.shape[i];
    compact *= tensor.shape[i];
  }
}

float ScoreBias::add(float score, const foveal_score_index* index, void* bias) {
  const auto& self = *static_cast<const ScoreBias*>(bias);
  const std::int64_t at[4] = {index->request, index->query_head, index->query_row,
                              index->key_position};
  std::int64_t offset = 0;
  for (int i = 0; i < 4; ++i) {
    if (self.sizes_[i] != 1 && at[i] >= self.sizes_[i]) {
      return std::numeric_limits<float>::quiet_NaN();
    }
    offset += at[i] * self.strides_[i];
  }
  return score + self.data_[offset];
}

Spec::Spec(const nb::kwargs& members) {
  Keywords keywords("Spec", members);
  check(foveal_spec_init(&c_, sizeof c_));
  c_.num_heads = to_int("num_heads", keywords.require("num_heads"));
  c_.num_kv_heads =
      to_optional_int("num_kv_heads", keywords.take("num_kv_heads")).value_or(c_.num_heads);
  c_.head_size = to_int("head_size", keywords.require("head_size"));
  c_.head_size_v = to_optional_int("head_size_v", keywords.take("head_size_v")).value_or(0);
  const auto number = [&](const char* name, float& member) {
    if (const nb::object value = keywords.take(name); !value.is_none()) {
      member = to_float(name, value);
      if (member != member) {
        raise(PyExc_ValueError, std::string(name) + " is nan, it must be a number");
      }
    }
  };
  number("scale", c_.scale);
  number("logits_soft_cap", c_.logits_soft_cap);
  number("q_scale", c_.q_scale);
  number("k_scale", c_.k_scale);
  number("v_scale", c_.v_scale);
  if (const nb::object value = keywords.take("dtype"); !value.is_none()) {
    c_.dtype = to_dtype("dtype", value);
  }
  if (const nb::object value = keywords.take("kv_cache_dtype"); !value.is_none()) {
    c_.kv_cache_dtype = to_dtype("kv_cache_dtype", value);
  }
  if (const nb::object value = keywords.take("attn_type"); !value.is_none()) {
    c_.attn_type = to_choice("attn_type", value, kAttnTypes);
  }
  if (const nb::object value = keywords.take("window"); !value.is_none()) {
    if (PyTuple_Check(value.ptr()) != 0 || PyList_Check(value.ptr()) != 0) {
      if (nb::len(value) != 2) {
        raise(PyExc_ValueError, "window has " + std::to_string(nb::len(value)) +
                                    " entries, it must be (left, right) or a number of tokens");
      }
      c_.window_left = to_int("window[0]", nb::object(value[0]));
      c_.window_right = to_int("window[1]", nb::object(value[1]));
    } else {
      const std::int64_t tokens = to_int("window", value);
      if (tokens < 1) {
        raise(PyExc_ValueError, "window is " + std::to_string(tokens) +
                                    ", it must be at least 1: it counts the token itself");
      }
      c_.window_left = tokens - 1;
      c_.window_right = 0;
    }
  }
  alibi_slopes_ = to_floats("alibi_slopes", keywords.take("alibi_slopes"));
  sinks_ = to_floats("sinks", keywords.take("sinks"));
  c_.alibi_slopes = alibi_slopes_.data();
  c_.num_alibi_slopes = static_cast<std::int64_t>(alibi_slopes_.size());
  c_.sinks = sinks_.data();
  c_.num_sinks = static_cast<std::int64_t>(sinks_.size());
  if (const nb::object value = keywords.take("mla"); !value.is_none()) {
    if (PyTuple_Check(value.ptr()) == 0 || nb::len(value) != 4) {
      raise(PyExc_TypeError, "mla is " + kind_of(value) +
                                 ", it must be (kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, "
                                 "v_head_dim)");
    }
    mla_ = {to_int("mla[0]", nb::object(value[0])), to_int("mla[1]", nb::object(value[1])),
            to_int("mla[2]", nb::object(value[2])), to_int("mla[3]", nb::object(value[3]))};
    c_.mla = &mla_;
  }
  if (const nb::object value = keywords.take("kv_sharing_target"); !value.is_none()) {
    kv_sharing_target_ = to_string("kv_sharing_target", value);
    c_.kv_sharing_target = kv_sharing_target_.c_str();
  }
  if (PyObject* bias = PyDict_GetItemString(members.ptr(), "_score_bias")) {
    score_bias_ = std::make_shared<ScoreBias>(bias);
    keywords.take("_score_bias");
    c_.score_mod = &ScoreBias::add;
    c_.mod_user_data = score_bias_.get();
  }
  keywords.expect_no_more();
  std::int64_t bytes = 0;  // Throws what is wrong with the spec.
  check(foveal_kv_cache_page_size_bytes(&c_, 1, &bytes));
}

std::string Spec::describe() const {
  return "foveal.Spec(num_heads=" + std::to_string(c_.num_heads) +
         ", num_kv_heads=" + std::to_string(c_.num_kv_heads) +
         ", head_size=" + std::to_string(c_.head_size) + ", dtype='" + dtype_name(c_.dtype) + "')";
}

void bind_selection(nb::module_& module) {
  module.def("version", &foveal_version, "Version of the library, \"major.minor.patch\".");
  module.def(
      "devices", &devices, nb::sig("def devices() -> list[dict[str, Any]]"),
      "The CPU, then the CUDA devices the driver shows: device (\"cpu\", \"cuda:0\"), name,\n"
      "compute_capability and memory_bytes of each.");
  nb::class_<Spec>(
      module, "Spec",
      "What never changes for a layer; keywords only.\n\n"
      "num_heads: query heads. num_kv_heads: divides num_heads; by default the same.\n"
      "head_size: of queries and keys; head_size_v: of values and output, by default the "
      "same.\n"
      "scale: by default 1/sqrt(head_size); MLA layers must give it.\n"
      "dtype, kv_cache_dtype: strings or dtypes of NumPy, ml_dtypes, PyTorch.\n"
      "attn_type: \"decoder\", \"encoder\", \"encoder_only\" or \"encoder_decoder\".\n"
      "window: W tokens, the token itself counted, or (left, right) without it; -1 is "
      "unlimited.\n"
      "alibi_slopes, sinks: num_heads numbers.\n"
      "q_scale, k_scale, v_scale: what is stored in fp8 is value / scale.\n"
      "mla: (kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim).\n"
      "Raises ValueError or TypeError that names the member.")
      .def(nb::init<const nb::kwargs&>(),
           nb::sig("def __init__(self, *, num_heads: int, head_size: int, num_kv_heads: int | None "
                   "= None, head_size_v: int | None = None, scale: float | None = None, dtype: "
                   "DType = 'bfloat16', kv_cache_dtype: DType | None = None, attn_type: str = "
                   "'decoder', window: int | tuple[int, int] | None = None, logits_soft_cap: float "
                   "| None = None, alibi_slopes: Sequence[float] | Array | None = None, sinks: "
                   "Sequence[float] | Array | None = None, q_scale: float | None = None, k_scale: "
                   "float | None = None, v_scale: float | None = None, mla: tuple[int, int, int, "
                   "int] | None = None, kv_sharing_target: str | None = None) -> None"))
      .def("__repr__", &Spec::describe)
      .def(
          "page_size_bytes",
          [](const Spec& spec, nb::handle block_size) {
            std::int64_t bytes = 0;
            check(foveal_kv_cache_page_size_bytes(spec.get(), to_int("block_size", block_size),
                                                  &bytes));
            return bytes;
          },
          nb::arg("block_size").none(),
          nb::sig("def page_size_bytes(self, block_size: int) -> int"),
          "Bytes of one block of the layer's cache.");
  nb::class_<Selection>(module, "Selection", "How a selection came out; print it.")
      .def_prop_ro(
          "chosen",
          [](const Selection& s) -> nb::object {
            const std::string_view id = foveal_selection_chosen(s.handle.get());
            return id.empty() ? nb::none() : nb::object(nb::str(id.data()));
          },
          nb::sig("def chosen(self) -> str | None"), "Id of the backend, or None.")
      .def_prop_ro(
          "summary", [](const Selection& s) { return foveal_selection_summary(s.handle.get()); },
          "One line.")
      .def_prop_ro(
          "json", [](const Selection& s) { return foveal_selection_json(s.handle.get()); },
          "Config, chosen, passed_over and candidates, as JSON.")
      .def_prop_ro(
          "candidates", &candidates, nb::sig("def candidates(self) -> list[dict[str, Any]]"),
          "id, display_name, priority, chosen and reasons of each, in order of preference.")
      .def("__str__", [](const Selection& s) { return foveal_selection_text(s.handle.get()); });

  constexpr const char* kSelectorKeywords =
      "*, device: str | Any = 'cpu', compute_capability: int | None = None, block_size: int | None "
      "= "
      "None, causal: bool = True, needs_lse: bool = False, needs_graphs: str = 'never', "
      "batch_invariant: bool = False, decode_context_parallel_size: int = 1, "
      "prefill_context_parallel_size: int = 1, backend: str | None = None";
  static const std::string explain_sig =
      "def explain(spec: Spec, " + std::string(kSelectorKeywords) + ") -> Selection";
  static const std::string select_sig =
      "def select(spec: Spec, " + std::string(kSelectorKeywords) + ") -> Backend";
  module.def(
      "explain",
      [](nb::handle spec, const nb::kwargs& given) {
        std::string backend;
        const foveal_selector_config config = to_config(to_spec(spec), given, backend);
        foveal_selection* selection = nullptr;
        check(foveal_explain_selection(&config, &selection));
        return Selection{.handle = decltype(Selection::handle)(selection)};
      },
      nb::arg("spec").none(), nb::arg("kwargs"), nb::sig(explain_sig.c_str()),
      "Which backend serves the layer, and why each of the others does not. "
      "`print(foveal.explain(\n"
      "spec, device='cuda'))` tells people; `.candidates` and `.json` programs.");
  module.def(
      "select",
      [](nb::handle spec, const nb::kwargs& given) {
        std::string backend;
        const foveal_selector_config config = to_config(to_spec(spec), given, backend);
        foveal_backend* made = nullptr;
        check(foveal_select_backend(&config, &made));
        return Backend{.handle = decltype(Backend::handle)(made)};
      },
      nb::arg("spec").none(), nb::arg("kwargs"), nb::sig(select_sig.c_str()),
      "The first backend in order of preference that serves the layer, or the one of the id\n"
      "`backend`. Raises UnsupportedError with every reason when there is none.");

  nb::class_<foveal_kv_cache_layout>(module, "KVCacheLayout", "A backend's cache tensor.")
      .def_prop_ro(
          "shape",
          [](const foveal_kv_cache_layout& layout) {
            return std::vector<std::int64_t>(layout.shape, layout.shape + layout.ndim);
          },
          "Logical shape.")
      .def_prop_ro(
          "stride_order",
          [](const foveal_kv_cache_layout& layout) {
            return std::vector<std::int32_t>(layout.stride_order,
                                             layout.stride_order + layout.ndim);
          },
          "Dimensions in memory, outermost first.")
      .def_prop_ro(
          "strides",
          [](const foveal_kv_cache_layout& layout) {
            return std::vector<std::int64_t>(layout.strides, layout.strides + layout.ndim);
          },
          "In elements.")
      .def_prop_ro("dtype",
                   [](const foveal_kv_cache_layout& layout) { return dtype_name(layout.dtype); })
      .def_ro("size_bytes", &foveal_kv_cache_layout::size_bytes);
  nb::class_<Backend>(module, "Backend", "Makes what serves a layer; of foveal.select.")
      .def_prop_ro("name", [](const Backend& b) { return foveal_backend_name(b.handle.get()); })
      .def_prop_ro("runtime",
                   [](const Backend& b) { return foveal_backend_runtime(b.handle.get()); })
      .def("kv_cache_layout", &layout_of, nb::arg("spec").none(), nb::arg("block_size").none(),
           nb::arg("num_blocks").none(), nb::arg("order").none() = "nhd",
           nb::sig("def kv_cache_layout(self, spec: Spec, block_size: int, num_blocks: int, order: "
                   "str = 'nhd') -> KVCacheLayout"),
           "The cache tensor for num_blocks blocks of block_size tokens: [num_blocks, 2, "
           "block_size,\n"
           "num_kv_heads, head_size], or [num_blocks, num_kv_heads, block_size, head_size +\n"
           "head_size_v] where keys and values differ in size; MLA: [num_blocks, block_size,\n"
           "kv_lora_rank + qk_rope_head_dim]. `order` is \"nhd\" or \"hnd\".")
      .def(
          "preferred_block_size",
          [](const Backend& backend, nb::handle wanted) {
            std::int64_t size = 0;
            check(foveal_backend_preferred_block_size(backend.handle.get(),
                                                      to_int("wanted", wanted), &size));
            return size;
          },
          nb::arg("wanted").none() = 16,
          nb::sig("def preferred_block_size(self, wanted: int = 16) -> int"),
          "`wanted` where the backend accepts blocks of it, else its smallest.")
      .def(
          "kv_cache",
          [](const Backend& backend, nb::handle spec, nb::handle cache) {
            CallStream stream{nb::none()};
            auto tensor = std::make_unique<Tensor>("cache", cache, Access::kWrite, stream,
                                                   /*optional=*/false, /*hold=*/true);
            auto views = std::make_unique<KVCache>();
            check(foveal_backend_kv_cache_views(backend.handle.get(), to_spec(spec).get(), 1,
                                                *tensor, &views->key, &views->value));
            views->has_value = true;
            views->held.push_back(std::move(tensor));
            return views;
          },
          nb::arg("spec").none(), nb::arg("cache").none(),
          nb::sig("def kv_cache(self, spec: Spec, cache: Array) -> KVCache"),
          "Keys and values inside a cache tensor of kv_cache_layout(); for the layer's calls.");
}

}  // namespace foveal::python
