#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/machine.h"
#include "foveal/commands.h"

namespace foveal::tools {
namespace {

using Json = nlohmann::ordered_json;

template <typename T>
Json names_json(const std::vector<T>& values) {
  Json names = Json::array();
  for (const T& value : values) {
    names.push_back(to_string(value));
  }
  return names;
}

Json backend_json(const BackendRegistry::Entry& entry) {
  Json json{{"id", entry.id}, {"display_name", entry.display_name}, {"source", entry.source}};
  AttentionBackendPtr backend;
  try {
    backend = BackendRegistry::global().get(entry.id);
  } catch (const Error& error) {
    json["error"] = error.what();
    return json;
  }
  const BackendCapabilities& can = backend->capabilities();
  json["device"] = to_string(can.device);
  if (can.device == DeviceType::cuda) {
    json["compute_capability"] = {
        {"min", can.min_compute_capability},
        {"max",
         can.max_compute_capability == 0 ? Json(nullptr) : Json(can.max_compute_capability)}};
  }
  json["runtime"] = backend->runtime();
  json["chosen_automatically"] = can.auto_select;
  json["dtypes"] = names_json(can.dtypes);
  json["kv_cache_dtypes"] = names_json(can.kv_cache_dtypes);
  json["head_sizes"] = {{"multiple_of", can.head_size_multiple},
                        {"max", can.max_head_size == 0 ? Json(nullptr) : Json(can.max_head_size)},
                        {"only", can.head_sizes},
                        {"different_for_values", can.different_head_size_v}};
  json["block_sizes"] = Json::array();
  for (const BlockSize& size : can.block_sizes) {
    json["block_sizes"].push_back({{"size", size.size}, {"multiples", size.multiples}});
  }
  json["attn_types"] = names_json(can.attn_types);
  json["graph_support"] = to_string(can.graphs);
  json["features"] = {{"mla", can.mla},
                      {"sinks", can.sinks},
                      {"sliding_window", can.sliding_window},
                      {"soft_cap", can.soft_cap},
                      {"alibi", can.alibi},
                      {"custom_score", can.custom_score},
                      {"non_causal", can.non_causal},
                      {"lse", can.lse},
                      {"decode_context_parallel", can.decode_context_parallel},
                      {"prefill_context_parallel", can.prefill_context_parallel},
                      {"batch_invariant", can.batch_invariant},
                      {"cascade", can.cascade}};
  return json;
}

std::string join(const Json& names) {
  return names.empty() ? "none"
                       : fmt::format("{}", fmt::join(names.get<std::vector<std::string>>(), ", "));
}

void print_backend(const Json& backend) {
  fmt::print("\n{}  {} ({})\n", backend["id"].get<std::string>(),
             backend["display_name"].get<std::string>(), backend["source"].get<std::string>());
  if (backend.contains("error")) {
    fmt::print("  not available: {}\n", backend["error"].get<std::string>());
    return;
  }
  const std::string runtime = backend["runtime"];
  fmt::print("  device       {}{}\n", backend["device"].get<std::string>(),
             runtime.empty() ? "" : ", " + runtime);
  fmt::print("  dtypes       {}; caches of the same dtype and: {}\n", join(backend["dtypes"]),
             join(backend["kv_cache_dtypes"]));
  const Json& heads = backend["head_sizes"];
  const std::int64_t multiple = heads["multiple_of"];
  std::string sizes = multiple > 1 ? fmt::format("multiples of {}", multiple) : "any";
  sizes += heads["max"].is_null() ? "" : " up to " + heads["max"].dump();
  if (!heads["only"].empty()) {
    sizes = fmt::format("{}", fmt::join(heads["only"].get<std::vector<std::int64_t>>(), ", "));
  }
  fmt::print("  head sizes   {}{}\n", sizes,
             heads["different_for_values"].get<bool>() ? ", values may differ from keys" : "");
  std::vector<std::string> blocks;
  for (const Json& size : backend["block_sizes"]) {
    const bool any = size["multiples"].get<bool>() && size["size"].get<std::int64_t>() == 1;
    blocks.push_back(
        any ? "any" : (size["multiples"].get<bool>() ? "multiples of " : "") + size["size"].dump());
  }
  fmt::print("  block sizes  {}\n",
             blocks.empty() ? "any" : fmt::format("{}", fmt::join(blocks, ", ")));
  fmt::print("  layers       {}\n", join(backend["attn_types"]));
  std::vector<std::string> features;
  for (const auto& [name, supported] : backend["features"].items()) {
    if (supported.get<bool>()) {
      features.push_back(name);
    }
  }
  fmt::print("  features     {}\n", fmt::join(features, ", "));
  fmt::print("  graphs       {}\n", backend["graph_support"].get<std::string>());
  if (!backend["chosen_automatically"].get<bool>()) {
    fmt::print("  chosen by name only\n");
  }
}

int run_info(bool as_json) {
  Json json;
  json["version"] = version();
  json["machine"] = {
      {"processor", bench::processor_name()},
      {"threads", default_thread_pool().num_threads()},
      {"memory_gib", static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                         static_cast<double>(sysconf(_SC_PAGESIZE)) / (1024.0 * 1024.0 * 1024.0)}};
  json["backends"] = Json::array();
  for (const BackendRegistry::Entry& entry : BackendRegistry::global().entries()) {
    json["backends"].push_back(backend_json(entry));
  }
  if (as_json) {
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  const Json& machine = json["machine"];
  fmt::print("foveal {}\n{}, {} threads, {:.1f} GiB memory\n\nBackends in order of preference:\n",
             version(), machine["processor"].get<std::string>(), machine["threads"].get<int>(),
             machine["memory_gib"].get<double>());
  for (const Json& backend : json["backends"]) {
    print_backend(backend);
  }
  return 0;
}

}  // namespace

CLI::App* add_info_command(CLI::App& app, int& exit_code) {
  auto as_json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("info", "This machine, the backends, and what each supports");
  command->add_flag("--json", *as_json, "Print JSON");
  command->footer("Example:\n  foveal info --json");
  command->callback([as_json, &exit_code] { exit_code = run_info(*as_json); });
  return command;
}

}  // namespace foveal::tools
