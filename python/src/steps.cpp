// Builders and their plans.
#include <algorithm>
#include <array>
#include <cstring>

#include "arguments.h"
#include "objects.h"

namespace foveal::python {
namespace {

/// A tensor of a step: copied or held, and described for the C call.
class StepTensor {
 public:
  StepTensor(const char* name, nb::handle array, CallStream& stream, Metadata& metadata,
             bool optional = true) {
    auto tensor =
        std::make_unique<Tensor>(name, array, Access::kRead, stream, optional, /*hold=*/true);
    if (tensor->get() == nullptr) {
      return;
    }
    present_ = true;
    view_ = *tensor->get();
    // What is not a table of integers is refused by the call, which reads nothing of it.
    if (tensor->on_cpu() && view_.dtype.code == kDLInt && view_.dtype.bits >= 32 &&
        view_.ndim >= 1 && view_.ndim <= 2) {
      copy(name, metadata);
    }
    metadata.held.push_back(std::move(tensor));
  }
  StepTensor(const StepTensor&) = delete;
  StepTensor& operator=(const StepTensor&) = delete;

  const DLTensor* get() const { return present_ ? &view_ : nullptr; }
  std::int64_t size() const { return present_ && view_.ndim > 0 ? view_.shape[0] : 0; }
  /// The values of an i32 vector in host memory, else null.
  const std::int32_t* host_values() const {
    return copied_ && view_.dtype.bits == 32 && view_.ndim == 1
               ? static_cast<const std::int32_t*>(view_.data)
               : nullptr;
  }

 private:
  void copy(const char* name, Metadata& metadata) {
    const std::int64_t rows = view_.ndim == 2 ? view_.shape[0] : 1;
    const std::int64_t columns = view_.shape[view_.ndim - 1];
    const std::int64_t row_stride =
        view_.ndim == 2 && view_.strides != nullptr ? view_.strides[0] : columns;
    const std::int64_t stride = view_.strides != nullptr ? view_.strides[view_.ndim - 1] : 1;
    constexpr std::int64_t kMost = std::int64_t{1} << 28;
    std::int64_t count = 0;
    if (__builtin_mul_overflow(rows, columns, &count) || count > kMost) {
      raise(PyExc_ValueError, std::string(name) + " has more than 2^28 elements");
    }
    const std::size_t bytes = view_.dtype.bits / 8;
    auto memory =
        std::make_unique<std::int64_t[]>((static_cast<std::size_t>(count) * bytes + 7) / 8 + 1);
    const auto* from = static_cast<const char*>(view_.data) + view_.byte_offset;
    auto* to = reinterpret_cast<char*>(memory.get());
    for (std::int64_t r = 0; count > 0 && r < rows; ++r) {  // Rows of nothing may be 2^40.
      const char* row = from + r * row_stride * static_cast<std::int64_t>(bytes);
      if (stride == 1) {
        std::memcpy(to, row, static_cast<std::size_t>(columns) * bytes);
        to += static_cast<std::size_t>(columns) * bytes;
        continue;
      }
      for (std::int64_t c = 0; c < columns; ++c, to += bytes) {
        std::memcpy(to, row + c * stride * static_cast<std::int64_t>(bytes), bytes);
      }
    }
    std::copy(view_.shape, view_.shape + view_.ndim, shape_.begin());
    view_.data = memory.get();
    view_.shape = shape_.data();
    view_.strides = nullptr;
    view_.byte_offset = 0;
    copied_ = true;
    metadata.copies.push_back(std::move(memory));
  }

  bool present_ = false;
  bool copied_ = false;
  DLTensor view_{};
  std::array<std::int64_t, 2> shape_{};
};

/// A number of the step: given, or found from host values; 0 where the call will refuse anyway.
std::int64_t number(const char* name, nb::handle given, const std::int32_t* values,
                    std::int64_t found, bool refused_anyway) {
  if (const auto number = to_optional_int(name, given)) {
    return *number;
  }
  if (values == nullptr && !refused_anyway) {
    raise(PyExc_TypeError,
          std::string(name) +
              " must be given where the step's tensors are on a device without host "
              "copies");
  }
  return found;
}

std::unique_ptr<Metadata> build(Builder& builder, nb::handle query_start_loc, nb::handle seq_lens,
                                nb::handle block_table, nb::handle slot_mapping,
                                nb::handle key_start_loc, nb::handle num_actual_tokens,
                                nb::handle max_query_len, nb::handle max_seq_len, nb::handle causal,
                                nb::handle common_prefix_len, nb::handle fast_build,
                                nb::handle query_start_loc_host, nb::handle seq_lens_host,
                                nb::handle cp_local_seq_lens, nb::handle for_graph_capture) {
  auto metadata = std::make_unique<Metadata>();
  CallStream stream{nb::none()};
  const StepTensor starts("query_start_loc", query_start_loc, stream, *metadata, false);
  const StepTensor lens("seq_lens", seq_lens, stream, *metadata, false);
  const StepTensor starts_host("query_start_loc_host", query_start_loc_host, stream, *metadata);
  const StepTensor lens_host("seq_lens_host", seq_lens_host, stream, *metadata);
  const StepTensor table("block_table", block_table, stream, *metadata);
  const StepTensor slots("slot_mapping", slot_mapping, stream, *metadata);
  const StepTensor key_starts("key_start_loc", key_start_loc, stream, *metadata);
  const StepTensor cp_lens("cp_local_seq_lens", cp_local_seq_lens, stream, *metadata);

  const StepTensor& start_values = starts.host_values() != nullptr ? starts : starts_host;
  const StepTensor& len_values = lens.host_values() != nullptr ? lens : lens_host;
  std::int64_t tokens = 0;
  std::int64_t longest_query = 0;
  if (const std::int32_t* values = start_values.host_values()) {
    const std::int64_t size = start_values.size();
    tokens = size > 0 ? values[size - 1] : 0;
    for (std::int64_t i = 1; i < size; ++i) {
      longest_query = std::max(longest_query, std::int64_t{values[i]} - values[i - 1]);
    }
  }
  std::int64_t longest = 0;
  if (const std::int32_t* values = len_values.host_values()) {
    for (std::int64_t i = 0; i < len_values.size(); ++i) {
      longest = std::max(longest, std::int64_t{values[i]});
    }
  }
  const auto on_cpu = [](const StepTensor& t) { return t.get()->device.device_type == kDLCPU; };
  foveal_step step{};
  step.struct_size = sizeof step;
  step.num_reqs = lens.size();
  step.num_actual_tokens = number("num_actual_tokens", num_actual_tokens,
                                  start_values.host_values(), tokens, on_cpu(starts));
  step.max_query_len = number("max_query_len", max_query_len, start_values.host_values(),
                              longest_query, on_cpu(starts));
  step.max_seq_len =
      number("max_seq_len", max_seq_len, len_values.host_values(), longest, on_cpu(lens));
  step.non_causal = !to_bool("causal", causal);
  step.query_start_loc = starts.get();
  step.seq_lens = lens.get();
  step.query_start_loc_host = starts_host.get();
  step.seq_lens_host = lens_host.get();
  step.block_table = table.get();
  step.slot_mapping = slots.get();
  step.key_start_loc = key_starts.get();
  step.cp_local_seq_lens = cp_lens.get();
  const std::int64_t prefix = to_int("common_prefix_len", common_prefix_len);
  const bool fast = to_bool("fast_build", fast_build);
  const bool capture = to_bool("for_graph_capture", for_graph_capture);
  if (capture && (prefix != 0 || fast)) {
    raise(PyExc_ValueError,
          "for_graph_capture is True, common_prefix_len must be 0 and fast_build False with it");
  }

  foveal_metadata* plan = nullptr;
  foveal_status status = FOVEAL_OK;
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(builder.state->mutex);
    foveal_builder* handle = builder.state->handle.get();
    status = capture ? foveal_builder_build_for_graph_capture(handle, &step, &plan)
                     : foveal_builder_build(handle, prefix, &step, fast, &plan);
  }
  check(status);
  metadata->handle.reset(plan);
  metadata->builder = builder.state;
  return metadata;
}

Builder make_builder(const Backend& backend, nb::handle spec, nb::handle block_size,
                     nb::handle num_blocks, nb::handle kernel_block_size, nb::handle device,
                     nb::handle stream, nb::handle max_num_reqs, nb::handle max_num_tokens,
                     nb::handle num_splits, nb::handle num_threads, nb::handle batch_invariant,
                     nb::handle flash_attn_version) {
  foveal_builder_config config{};
  config.struct_size = sizeof config;
  config.spec = to_instance<Spec>("spec", spec, "Spec").get();
  config.block_size = to_int("block_size", block_size);
  config.num_blocks = to_int("num_blocks", num_blocks);
  config.kernel_block_size = to_int("kernel_block_size", kernel_block_size);
  config.device = to_device("device", device);
  config.stream = to_stream(stream).value_or(nullptr);
  config.max_num_reqs = to_int("max_num_reqs", max_num_reqs);
  config.max_num_tokens = to_int("max_num_tokens", max_num_tokens);
  config.num_splits = to_int("num_splits", num_splits);
  config.num_threads = to_int32("num_threads", num_threads);
  config.batch_invariant = to_bool("batch_invariant", batch_invariant);
  config.flash_attn_version = to_int32("flash_attn_version", flash_attn_version);
  foveal_builder* builder = nullptr;
  check(foveal_backend_make_builder(backend.handle.get(), &config, &builder));
  Builder made{std::make_shared<BuilderState>()};
  made.state->handle.reset(builder);
  return made;
}

bool use_cascade(const Builder& builder, nb::handle common_prefix_len, nb::handle num_reqs,
                 nb::handle num_tokens, nb::handle single_token_queries,
                 nb::handle context_parallel_size) {
  foveal_cascade_query query{};
  query.struct_size = sizeof query;
  query.common_prefix_len = to_int("common_prefix_len", common_prefix_len);
  query.num_reqs = to_int("num_reqs", num_reqs);
  query.num_tokens = to_int("num_tokens", num_tokens);
  query.single_token_queries = to_bool("single_token_queries", single_token_queries);
  query.context_parallel_size = to_int("context_parallel_size", context_parallel_size);
  bool faster = false;
  check(foveal_builder_use_cascade(builder.state->handle.get(), &query, &faster));
  return faster;
}

const char* graph_support(const Builder& builder) {
  constexpr std::array kNames{"never", "uniform_single_token_decode", "uniform_batch", "always"};
  std::int32_t support = 0;
  check(foveal_builder_graph_support(builder.state->handle.get(), &support));
  return kNames[static_cast<std::size_t>(support)];
}

}  // namespace

void bind_steps(nb::module_& module) {
  nb::class_<Metadata>(module, "Metadata",
                       "A plan for one step, of Builder.build; read by every layer of the group.")
      .def_prop_ro("workspace_bytes", [](const Metadata& metadata) {
        std::int64_t bytes = 0;
        check(foveal_metadata_workspace_bytes(metadata.handle.get(), &bytes));
        return bytes;
      });
  nb::class_<Builder>(module, "Builder", "Plans a step once for all layers of a KV-cache group.")
      .def(
          "build", &build, nb::arg("query_start_loc").none(), nb::arg("seq_lens").none(),
          nb::kw_only(), nb::arg("block_table") = nb::none(), nb::arg("slot_mapping") = nb::none(),
          nb::arg("key_start_loc") = nb::none(), nb::arg("num_actual_tokens") = nb::none(),
          nb::arg("max_query_len") = nb::none(), nb::arg("max_seq_len") = nb::none(),
          nb::arg("causal").none() = true, nb::arg("common_prefix_len").none() = 0,
          nb::arg("fast_build").none() = false, nb::arg("query_start_loc_host") = nb::none(),
          nb::arg("seq_lens_host") = nb::none(), nb::arg("cp_local_seq_lens") = nb::none(),
          nb::arg("for_graph_capture").none() = false,
          nb::sig("def build(self, query_start_loc: Array, seq_lens: Array, *, block_table: Array "
                  "| None = None, slot_mapping: Array | None = None, key_start_loc: Array | None = "
                  "None, num_actual_tokens: int | None = None, max_query_len: int | None = None, "
                  "max_seq_len: int | None = None, causal: bool = True, common_prefix_len: int = "
                  "0, fast_build: bool = False, query_start_loc_host: Array | None = None, "
                  "seq_lens_host: Array | None = None, cp_local_seq_lens: Array | None = None, "
                  "for_graph_capture: bool = False) -> Metadata"),
          "Checks the step, then plans it.\n\n"
          "query_start_loc: int32 [num_reqs + 1], where each request's query rows start.\n"
          "seq_lens: int32 [num_reqs], keys of each, those of this step included.\n"
          "block_table: int32 [num_reqs, max_blocks]; without it keys and values are plain.\n"
          "slot_mapping: int64 [num_actual_tokens], where new tokens go; -1 is padding.\n"
          "key_start_loc: int32 [num_reqs + 1], for plain keys; by default query_start_loc.\n"
          "num_actual_tokens, max_query_len, max_seq_len: found from the tensors where these are "
          "on\n"
          "the CPU or have host copies.\n"
          "for_graph_capture: the plan that a captured forward reads: give the largest\n"
          "num_actual_tokens, max_query_len and max_seq_len. A later build() of the same\n"
          "num_actual_tokens, num_reqs and max_query_len over the same tensors is what a replay\n"
          "then reads. Keep this Metadata as long as the graph.\n"
          "Tensors on the CPU are copied; those on a device must keep their values while the plan\n"
          "is used. Raises ValueError that names the argument.")
      .def("use_cascade", &use_cascade, nb::arg("common_prefix_len").none(),
           nb::arg("num_reqs").none(), nb::arg("num_tokens").none(),
           nb::arg("single_token_queries").none() = false,
           nb::arg("context_parallel_size").none() = 1,
           nb::sig("def use_cascade(self, common_prefix_len: int, num_reqs: int, num_tokens: int, "
                   "single_token_queries: bool = False, context_parallel_size: int = 1) -> bool"),
           "Whether a step is faster with build(common_prefix_len=…), the keys that all requests\n"
           "share; num_tokens are its query rows, one each where single_token_queries.")
      .def_prop_ro("graph_support", &graph_support)
      .def_prop_ro(
          "reorder_threshold",
          [](const Builder& builder) {
            std::int64_t threshold = 0;
            check(foveal_builder_reorder_threshold(builder.state->handle.get(), &threshold));
            return threshold < 0 ? nb::none() : nb::object(nb::int_(threshold));
          },
          nb::sig("def reorder_threshold(self) -> int | None"),
          "Requests of at most so many queries should stand first; None where order does not "
          "matter.");
  // Methods of Backend are bound where what they make is known.
  nb::object backend = module.attr("Backend");
  nb::cpp_function_def(
      &make_builder, nb::scope(backend), nb::name("make_builder"), nb::is_method(),
      nb::arg("spec").none(), nb::arg("block_size").none(), nb::arg("num_blocks").none() = 0,
      nb::kw_only(), nb::arg("kernel_block_size").none() = 0, nb::arg("device").none() = "cpu",
      nb::arg("stream") = nb::none(), nb::arg("max_num_reqs").none() = 0,
      nb::arg("max_num_tokens").none() = 0, nb::arg("num_splits").none() = 0,
      nb::arg("num_threads").none() = 0, nb::arg("batch_invariant").none() = false,
      nb::arg("flash_attn_version").none() = 0,
      nb::sig("def make_builder(self, spec: Spec, block_size: int, num_blocks: int = 0, *, "
              "kernel_block_size: int = 0, device: str | Any = 'cpu', stream: Stream = None, "
              "max_num_reqs: int = 0, max_num_tokens: int = 0, num_splits: int = 0, num_threads: "
              "int = 0, batch_invariant: bool = False, flash_attn_version: int = 0) -> Builder"),
      "A builder for layers of the spec over a pool of num_blocks blocks of block_size tokens. On\n"
      "CUDA, `stream` is where build() plans; forward must come behind it.");
}

}  // namespace foveal::python
