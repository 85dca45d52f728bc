#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "foveal/commands.h"

namespace foveal::tools {
namespace {

using Json = nlohmann::ordered_json;

struct CacheOptions {
  std::string action = "list";
  bool json = false;
};

std::string age(double seconds) {
  if (seconds < 3600) {
    return "< 1 h";
  }
  const double hours = seconds / 3600;
  return hours < 48 ? fmt::format("{:.0f} h", hours) : fmt::format("{:.0f} d", hours / 24);
}

int list_cache(bool as_json) {
  const KernelCache cache = kernel_cache();
  std::int64_t total = 0;
  for (const KernelInfo& kernel : cache.kernels) {
    total += kernel.bytes;
  }
  if (as_json) {
    Json json{{"folder", cache.folder},
              {"max_bytes", cache.max_bytes},
              {"bytes", total},
              {"kernels", Json::array()}};
    for (const KernelInfo& kernel : cache.kernels) {
      json["kernels"].push_back({{"key", kernel.key},
                                 {"arch", kernel.arch},
                                 {"bytes", kernel.bytes},
                                 {"registers", kernel.registers},
                                 {"stack_bytes", kernel.stack_bytes},
                                 {"spill_bytes", kernel.spill_bytes},
                                 {"age_seconds", kernel.age_seconds},
                                 {"file", kernel.file}});
    }
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  if (!cache.kernels.empty()) {
    fmt::print("{:>9}  {:>6}  {:>9}  {:>8}  kernel\n", "bytes", "used", "registers", "stack");
  }
  for (const KernelInfo& kernel : cache.kernels) {
    fmt::print("{:>9}  {:>6}  {:>9}  {:>8}  {}\n", kernel.bytes, age(kernel.age_seconds),
               kernel.registers, kernel.stack_bytes, kernel.key);
  }
  fmt::print("{} kernels, {:.1f} of {:.0f} MiB, in {}\n", cache.kernels.size(),
             static_cast<double>(total) / (1 << 20),
             static_cast<double>(cache.max_bytes) / (1 << 20), cache.folder);
  return 0;
}

int run_cache(const CacheOptions& options) {
  if (options.action == "list") {
    return list_cache(options.json);
  }
  const std::int64_t removed = clear_kernel_cache();
  if (options.json) {
    fmt::print("{}\n", Json{{"removed", removed}}.dump(2));
  } else {
    fmt::print("{} kernels removed\n", removed);
  }
  return 0;
}

}  // namespace

CLI::App* add_cache_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CacheOptions>();
  CLI::App* command = app.add_subcommand("cache", "List or clear the compiled GPU kernels on disk");
  command->add_option("action", options->action, "list or clear")
      ->check(CLI::IsMember({"list", "clear"}))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "The folder is ${FOVEAL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/foveal}/cubins; "
      "FOVEAL_CACHE_MAX_MB bounds it\n(512 by default).\n\nExamples:\n"
      "  foveal cache\n"
      "  foveal cache clear\n"
      "  foveal cache list --json");
  command->callback([options, &exit_code] { exit_code = run_cache(*options); });
  return command;
}

}  // namespace foveal::tools
