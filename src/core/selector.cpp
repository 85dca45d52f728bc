#include "foveal/selector.h"

#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/registry_impl.h"

namespace foveal {
namespace {

using Json = nlohmann::ordered_json;

bool accepts_block_size(const std::vector<BlockSize>& sizes, std::int64_t block_size) {
  // The cache manager's block only has to be a multiple of a kernel block: the builder splits the
  // table.
  return sizes.empty() || std::any_of(sizes.begin(), sizes.end(), [&](const BlockSize& size) {
           return block_size % size.size == 0;
         });
}

std::string describe_block_sizes(const std::vector<BlockSize>& sizes) {
  std::vector<std::string> words;
  words.reserve(sizes.size());
  for (const BlockSize& size : sizes) {
    words.push_back(size.multiples ? fmt::format("any multiple of {}", size.size)
                                   : std::to_string(size.size));
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

template <typename T>
std::string names_of(const std::vector<T>& values) {
  std::vector<std::string_view> names;
  names.reserve(values.size());
  for (const T& value : values) {
    names.push_back(to_string(value));
  }
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

template <typename T>
bool contains(const std::vector<T>& values, const T& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::string head_size_rule(const BackendCapabilities& can) {
  if (!can.head_sizes.empty()) {
    return fmt::format("{}", fmt::join(can.head_sizes, ", "));
  }
  std::string rule =
      can.head_size_multiple > 1 ? fmt::format("multiples of {}", can.head_size_multiple) : "any";
  return can.max_head_size > 0 ? fmt::format("{} up to {}", rule, can.max_head_size) : rule;
}

bool accepts_head_size(const BackendCapabilities& can, std::int64_t head_size) {
  if (!can.head_sizes.empty()) {
    return contains(can.head_sizes, head_size);
  }
  return head_size % can.head_size_multiple == 0 &&
         (can.max_head_size == 0 || head_size <= can.max_head_size);
}

std::string explicit_backend(const SelectorConfig& config) {
  std::string id = upper_id(config.backend);
  return id == "AUTO" ? std::string() : id;
}

void check_config(const SelectorConfig& config) {
  check(config.head_size > 0, "head_size is {}, it must be positive", config.head_size);
  check(config.head_size_v >= 0, "head_size_v is {}, it must be positive, or 0 for head_size",
        config.head_size_v);
  check(!config.block_size || *config.block_size > 0, "block_size is {}, it must be positive",
        config.block_size.value_or(0));
  check(config.compute_capability >= 0, "compute_capability is {}, it must be >= 0",
        config.compute_capability);
  check(config.decode_context_parallel_size >= 1,
        "decode_context_parallel_size is {}, it must be >= 1", config.decode_context_parallel_size);
  check(config.prefill_context_parallel_size >= 1,
        "prefill_context_parallel_size is {}, it must be >= 1",
        config.prefill_context_parallel_size);
}

/// One spelling for equal wishes, and every member in it: the cache's key, and the text and JSON of
/// reports.
Json config_json(const SelectorConfig& config) {
  Json json;
  json["device"] = to_string(config.device);
  json["compute_capability"] = config.compute_capability;
  json["head_size"] = config.head_size;
  json["head_size_v"] = config.head_size_v == 0 ? config.head_size : config.head_size_v;
  json["dtype"] = to_string(config.dtype);
  json["kv_cache_dtype"] = to_string(config.kv_cache_dtype.value_or(config.dtype));
  json["block_size"] = config.block_size ? Json(*config.block_size) : Json("free");
  json["attn_type"] = to_string(config.attn_type);
  json["use_mla"] = config.use_mla;
  json["has_sinks"] = config.has_sinks;
  json["has_sliding_window"] = config.has_sliding_window;
  json["has_soft_cap"] = config.has_soft_cap;
  json["has_alibi"] = config.has_alibi;
  json["has_custom_score"] = config.has_custom_score;
  json["use_non_causal"] = config.use_non_causal;
  json["needs_lse"] = config.needs_lse;
  json["needs_graphs"] = to_string(config.needs_graphs);
  json["decode_context_parallel_size"] = config.decode_context_parallel_size;
  json["prefill_context_parallel_size"] = config.prefill_context_parallel_size;
  json["batch_invariant"] = config.batch_invariant;
  const std::string backend = explicit_backend(config);
  json["backend"] = backend.empty() ? "auto" : backend;
  return json;
}

/// Validates every backend in question; the caller holds the registry's lock.
SelectionReport make_report(const SelectorConfig& config, BackendRegistry::Impl& registry) {
  check_config(config);
  SelectionReport report;
  report.config = config;
  const std::string wanted = explicit_backend(config);
  if (!wanted.empty()) {
    registry.require(wanted);
  }
  std::int64_t priority = 0;
  // Loading may add backends, so the list is fixed first.
  std::vector<Candidate> listed;
  for (const BackendRegistry::Impl::Slot& slot : registry.slots) {
    listed.push_back({slot.id, slot.display_name, priority++, false, {}});
  }
  for (Candidate& candidate : listed) {
    if (!wanted.empty() && candidate.id != wanted) {
      continue;
    }
    std::string load_error;
    const AttentionBackendPtr backend = registry.load(candidate.id, load_error);
    if (!backend) {
      candidate.reasons.push_back(fmt::format("cannot be loaded: {}", load_error));
    } else {
      candidate.reasons = backend->validate(config);
      if (wanted.empty() && !backend->capabilities().auto_select) {
        candidate.reasons.emplace_back("is chosen by name only");
      }
    }
    if (candidate.reasons.empty() && report.chosen.empty()) {
      candidate.chosen = true;
      report.chosen = candidate.id;
    } else if (report.chosen.empty() && backend &&
               backend->capabilities().device == config.device &&
               backend->capabilities().auto_select &&
               backend->capabilities().mla == config.use_mla) {
      report.passed_over.push_back(candidate.id);
    }
    report.candidates.push_back(std::move(candidate));
  }
  if (report.chosen.empty()) {
    report.passed_over.clear();
  }
  return report;
}

[[noreturn]] void throw_none(const SelectionReport& report) {
  std::string message = report.config.backend.empty() || explicit_backend(report.config).empty()
                            ? "no attention backend can serve"
                            : fmt::format("backend {} was asked for and cannot serve",
                                          explicit_backend(report.config));
  message += fmt::format(" {}", report.config.describe());
  for (const Candidate& candidate : report.candidates) {
    message += fmt::format("\n  {}: {}", candidate.id, fmt::join(candidate.reasons, "; "));
  }
  throw Error(ErrorCode::unsupported, message);
}

}  // namespace

SelectorConfig SelectorConfig::from(const AttentionSpec& spec, DeviceType device,
                                    int compute_capability) {
  spec.validate();
  SelectorConfig config;
  config.device = device;
  config.compute_capability = compute_capability;
  config.head_size = spec.head_size;
  config.head_size_v = spec.value_head_size();
  config.dtype = spec.dtype;
  config.kv_cache_dtype = spec.kv_cache_dtype;
  config.attn_type = spec.attn_type;
  config.use_mla = spec.mla.has_value();
  config.has_sinks = !spec.sinks.empty();
  config.has_sliding_window = !spec.window.unlimited();
  config.has_soft_cap = spec.logits_soft_cap > 0.0F;
  config.has_alibi = !spec.alibi_slopes.empty();
  config.has_custom_score = spec.score_mod || spec.mask_mod;
  return config;
}

std::string SelectorConfig::describe() const {
  std::vector<std::string> words;
  const Json members = config_json(*this);
  for (const auto& [name, value] : members.items()) {
    words.push_back(
        fmt::format("{}={}", name, value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

std::vector<std::string> capability_reasons(const BackendCapabilities& can,
                                            const SelectorConfig& config) {
  std::vector<std::string> reasons;
  const auto refuse = [&]<typename... Args>(bool refused, fmt::format_string<const Args&...> format,
                                            const Args&... args) {
    if (refused) {
      reasons.push_back(fmt::format(format, args...));
    }
  };
  const std::int64_t head_size_v = config.head_size_v == 0 ? config.head_size : config.head_size_v;
  const DType cache_dtype = config.kv_cache_dtype.value_or(config.dtype);
  const int capability = config.compute_capability;
  refuse(can.device != config.device, "device is {}, it serves {}", to_string(config.device),
         to_string(can.device));
  if (can.device == config.device && can.device == DeviceType::cuda) {
    refuse(capability < can.min_compute_capability,
           "compute_capability is {}, it must be at least {}", capability,
           can.min_compute_capability);
    refuse(can.max_compute_capability > 0 && capability > can.max_compute_capability,
           "compute_capability is {}, it may be at most {}", capability,
           can.max_compute_capability);
  }
  refuse(!accepts_head_size(can, config.head_size), "head_size is {}, accepted are {}",
         config.head_size, head_size_rule(can));
  if (!config.use_mla && head_size_v != config.head_size) {
    refuse(!can.different_head_size_v, "head_size_v is {}, it must be head_size = {}", head_size_v,
           config.head_size);
    refuse(can.different_head_size_v && !accepts_head_size(can, head_size_v),
           "head_size_v is {}, accepted are {}", head_size_v, head_size_rule(can));
  }
  refuse(!contains(can.dtypes, config.dtype), "dtype is {}, accepted are {}",
         to_string(config.dtype), names_of(can.dtypes));
  refuse(cache_dtype != config.dtype && !contains(can.kv_cache_dtypes, cache_dtype),
         "kv_cache_dtype is {}, accepted are the dtype itself and: {}", to_string(cache_dtype),
         names_of(can.kv_cache_dtypes));
  refuse(config.block_size && !accepts_block_size(can.block_sizes, *config.block_size),
         "block_size is {}, accepted are {}", config.block_size.value_or(0),
         describe_block_sizes(can.block_sizes));
  refuse(!contains(can.attn_types, config.attn_type), "attn_type is {}, accepted are {}",
         to_string(config.attn_type), names_of(can.attn_types));
  refuse(config.use_mla && !can.mla, "use_mla is true, MLA is not supported");
  refuse(!config.use_mla && can.mla, "use_mla is false, only MLA is supported");
  refuse(config.has_sinks && !can.sinks, "has_sinks is true, attention sinks are not supported");
  refuse(config.has_sliding_window && !can.sliding_window,
         "has_sliding_window is true, sliding windows are not supported");
  refuse(config.has_soft_cap && !can.soft_cap,
         "has_soft_cap is true, a logits soft cap is not supported");
  refuse(config.has_alibi && !can.alibi, "has_alibi is true, ALiBi is not supported");
  refuse(config.has_custom_score && !can.custom_score,
         "has_custom_score is true, custom scores and masks are not supported");
  refuse(config.use_non_causal && !can.non_causal,
         "use_non_causal is true, non-causal attention over the cache is not supported");
  refuse(config.needs_lse && !can.lse, "needs_lse is true, the log-sum-exp cannot be returned");
  refuse(config.needs_graphs > can.graphs, "needs_graphs is {}, graph support is {}",
         to_string(config.needs_graphs), to_string(can.graphs));
  refuse(config.decode_context_parallel_size > 1 && !can.decode_context_parallel,
         "decode_context_parallel_size is {}, it must be 1", config.decode_context_parallel_size);
  refuse(config.prefill_context_parallel_size > 1 && !can.prefill_context_parallel,
         "prefill_context_parallel_size is {}, it must be 1", config.prefill_context_parallel_size);
  refuse(config.batch_invariant && !can.batch_invariant,
         "batch_invariant is true, batch invariance is not supported");
  return reasons;
}

std::string SelectionReport::summary() const {
  if (chosen.empty()) {
    return "no backend can serve the layer";
  }
  if (!explicit_backend(config).empty()) {
    return fmt::format("{}, as asked for", chosen);
  }
  std::vector<std::string> refused;
  for (const Candidate& candidate : candidates) {
    if (candidate.chosen) {
      break;
    }
    refused.push_back(fmt::format("{}: {}", candidate.id, fmt::join(candidate.reasons, ", ")));
  }
  return refused.empty()
             ? fmt::format("{}, the first in order of preference", chosen)
             : fmt::format(
                   "{}, the first in order of preference that can serve the layer (before it, {})",
                   chosen, fmt::join(refused, "; "));
}

std::string SelectionReport::text() const {
  std::string text =
      fmt::format("{}\nfor {}\n", chosen.empty() ? "no backend can serve" : "chosen: " + chosen,
                  config.describe());
  for (const Candidate& candidate : candidates) {
    text += fmt::format("  {} {} ({})\n",
                        candidate.chosen ? "+" : (candidate.reasons.empty() ? " " : "-"),
                        candidate.id, candidate.display_name);
    for (const std::string& reason : candidate.reasons) {
      text += fmt::format("      {}\n", reason);
    }
    if (candidate.reasons.empty() && !candidate.chosen) {
      text += "      can serve, but a backend before it was chosen\n";
    }
  }
  if (!passed_over.empty()) {
    text += fmt::format("fell back past: {}\n", fmt::join(passed_over, ", "));
  }
  return text;
}

std::string SelectionReport::json() const {
  Json json;
  json["config"] = config_json(config);
  json["chosen"] = chosen.empty() ? Json(nullptr) : Json(chosen);
  json["passed_over"] = passed_over;
  json["candidates"] = Json::array();
  for (const Candidate& candidate : candidates) {
    json["candidates"].push_back(Json{{"id", candidate.id},
                                      {"display_name", candidate.display_name},
                                      {"priority", candidate.priority},
                                      {"chosen", candidate.chosen},
                                      {"reasons", candidate.reasons}});
  }
  return json.dump(2);
}

SelectionReport explain_selection(const SelectorConfig& config, BackendRegistry& registry) {
  const std::lock_guard lock(registry.impl().mutex);
  return make_report(config, registry.impl());
}

SelectionReport explain_selection(const SelectorConfig& config) {
  return explain_selection(config, BackendRegistry::global());
}

AttentionBackendPtr select_backend(const SelectorConfig& config, BackendRegistry& registry) {
  BackendRegistry::Impl& impl = registry.impl();
  const std::lock_guard lock(impl.mutex);
  const std::string key = config.describe();
  if (const auto cached = impl.selections.find(key); cached != impl.selections.end()) {
    const BackendRegistry::Impl::Selection& selection = cached->second;
    const bool fresh = selection.structure == impl.structure &&
                       std::all_of(selection.depends_on.begin(), selection.depends_on.end(),
                                   [&](const auto& seen) {
                                     const BackendRegistry::Impl::Slot* slot =
                                         impl.find(seen.first);
                                     return slot != nullptr && slot->version == seen.second;
                                   });
    if (fresh) {
      return selection.backend;
    }
    impl.selections.erase(cached);
  }

  const SelectionReport report = make_report(config, impl);
  if (report.chosen.empty()) {
    throw_none(report);
  }
  if (!report.passed_over.empty() && !impl.logged_fallbacks[key]) {
    impl.logged_fallbacks[key] = true;
    spdlog::warn("foveal: chose {} after {} could not serve; explain_selection tells why",
                 report.chosen, fmt::join(report.passed_over, ", "));
  }
  BackendRegistry::Impl::Selection selection;
  selection.structure = impl.structure;
  for (const Candidate& candidate : report.candidates) {
    selection.depends_on.emplace_back(candidate.id, impl.find(candidate.id)->version);
  }
  selection.backend = impl.find(report.chosen)->backend;
  return impl.selections.emplace(key, std::move(selection)).first->second.backend;
}

AttentionBackendPtr select_backend(const SelectorConfig& config) {
  return select_backend(config, BackendRegistry::global());
}

std::int64_t select_kernel_block_size(std::int64_t manager_block_size,
                                      std::span<const AttentionBackendPtr> backends) {
  check(manager_block_size > 0, "manager_block_size is {}, it must be positive",
        manager_block_size);
  check(!backends.empty() && std::find(backends.begin(), backends.end(), nullptr) == backends.end(),
        "backends is empty or holds a null, it must name at least one backend");
  const auto all_accept = [&](std::int64_t size) {
    return std::all_of(backends.begin(), backends.end(), [&](const AttentionBackendPtr& backend) {
      const std::vector<BlockSize>& sizes = backend->capabilities().block_sizes;
      return sizes.empty() ||
             std::any_of(sizes.begin(), sizes.end(),
                         [&](const BlockSize& accepted) { return accepted.accepts(size); });
    });
  };
  // The divisors from the largest down, the manager's own first.
  for (std::int64_t parts = 1; parts <= manager_block_size; ++parts) {
    if (manager_block_size % parts == 0 && all_accept(manager_block_size / parts)) {
      return manager_block_size / parts;
    }
  }
  std::string accepted;
  for (const AttentionBackendPtr& backend : backends) {
    accepted += fmt::format("\n  {}: {}", backend->name(),
                            describe_block_sizes(backend->capabilities().block_sizes));
  }
  fail(ErrorCode::unsupported,
       "no kernel block size divides the cache manager's block of {} and is accepted by all:{}",
       manager_block_size, accepted);
}

std::int64_t preferred_block_size(const AttentionBackend& backend, std::int64_t wanted) {
  check(wanted > 0, "wanted is {}, it must be positive", wanted);
  const std::vector<BlockSize>& sizes = backend.capabilities().block_sizes;
  if (accepts_block_size(sizes, wanted)) {
    return wanted;
  }
  return std::min_element(sizes.begin(), sizes.end(),
                          [](const BlockSize& a, const BlockSize& b) { return a.size < b.size; })
      ->size;
}

}  // namespace foveal
