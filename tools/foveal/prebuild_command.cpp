#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "foveal/commands.h"

namespace foveal::tools {
namespace {

using Json = nlohmann::ordered_json;

struct PrebuildOptions {
  PrebuildRequest request;
  std::string dtype = "bf16";
  std::vector<std::string> kv_cache_dtypes;
  bool json = false;
};

int run_prebuild(PrebuildOptions& options) {
  PrebuildRequest& request = options.request;
  request.dtype = parse_dtype("--dtype", options.dtype);
  for (const std::string& name : options.kv_cache_dtypes) {
    request.kv_cache_dtypes.push_back(name == "auto" ? request.dtype
                                                     : parse_dtype("--kv-cache-dtype", name));
  }
  const bool on_terminal = isatty(STDERR_FILENO) == 1;
  if (on_terminal) {
    request.progress = [](std::size_t done, std::size_t total) {
      print_stderr(fmt::format("\rcompiling: {} of {}", done, total));
    };
  }
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<KernelInfo> kernels = prebuild_kernels(request);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (on_terminal) {
    print_stderr(fmt::format("\r{:40}\r", ""));
  }
  std::int64_t bytes = 0;
  std::size_t spilling = 0;
  Json json{{"out", request.out}, {"seconds", seconds}, {"kernels", Json::array()}};
  for (const KernelInfo& kernel : kernels) {
    bytes += kernel.bytes;
    spilling += kernel.spill_bytes > 0 ? 1 : 0;
    json["kernels"].push_back({{"key", kernel.key},
                               {"arch", kernel.arch},
                               {"bytes", kernel.bytes},
                               {"registers", kernel.registers},
                               {"stack_bytes", kernel.stack_bytes},
                               {"spill_bytes", kernel.spill_bytes}});
  }
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("{}: {} kernels, {:.1f} MiB, {} with spills; {:.1f} s\n", request.out, kernels.size(),
             static_cast<double>(bytes) / (1 << 20), spilling, seconds);
  fmt::print("Use it with FOVEAL_KERNEL_PACK={}\n", request.out);
  return 0;
}

}  // namespace

CLI::App* add_prebuild_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PrebuildOptions>();
  PrebuildRequest& request = options->request;
  request.out = "foveal-kernels.pack";
  CLI::App* command = app.add_subcommand(
      "prebuild", "Compile a model's GPU kernels into one file, for machines without a compiler");
  command->add_option("--model", request.models, "Models, by name")->required()->delimiter(',');
  command
      ->add_option("--arch", request.archs,
                   "Architectures: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120")
      ->required()
      ->delimiter(',');
  command->add_option("--dtype", options->dtype, "f16 or bf16")->capture_default_str();
  command
      ->add_option("--kv-cache-dtype", options->kv_cache_dtypes,
                   "Of the cache, several allowed; by default the dtype")
      ->delimiter(',');
  command
      ->add_option("--block-size", request.block_size,
                   "Tokens a block of the cache manager: a multiple of 16")
      ->transform(whole_number(std::uint64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--out", request.out, "The file to write")->capture_default_str();
  command->add_option("--threads", request.threads, "0: as many as the machine has")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(fmt::format(
      "Needs NVRTC (libnvrtc.so of CUDA 12 or later), but no GPU.\nModels: {}\n\nExample:\n"
      "  foveal prebuild --arch sm_90a --model llama-3-8b --kv-cache-dtype auto,f8e4m3",
      fmt::join(known_models(), ", ")));
  command->callback([options, &exit_code] { exit_code = run_prebuild(*options); });
  return command;
}

}  // namespace foveal::tools
