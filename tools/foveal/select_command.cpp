#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "foveal/commands.h"

namespace foveal::tools {
namespace {

struct SelectOptions {
  std::string device = "cpu";
  std::string dtype = "bf16";
  std::string kv_cache_dtype;
  std::string attn_type = "decoder";
  std::string graphs = "never";
  std::int64_t block_size = 0;
  bool json = false;
  SelectorConfig config;
};

int run_select(SelectOptions& options) {
  SelectorConfig& config = options.config;
  config.device = parse_device("--device", options.device);
  config.dtype = parse_dtype("--dtype", options.dtype);
  if (!options.kv_cache_dtype.empty() && options.kv_cache_dtype != "auto") {
    config.kv_cache_dtype = parse_dtype("--kv-cache-dtype", options.kv_cache_dtype);
  }
  if (options.block_size != 0) {
    config.block_size = options.block_size;
  }
  config.attn_type = parse_attn_type("--attn-type", options.attn_type);
  config.needs_graphs = parse_graph_support("--graphs", options.graphs);
  const SelectionReport report = explain_selection(config);
  fmt::print("{}{}", options.json ? report.json() : report.text(), options.json ? "\n" : "");
  return report.chosen.empty() ? 1 : 0;
}

}  // namespace

CLI::App* add_select_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<SelectOptions>();
  SelectorConfig& config = options->config;
  config.head_size = 128;
  CLI::App* command = app.add_subcommand(
      "select", "Explain which backend serves a layer, and why the others do not");
  command->add_option("--device", options->device, "cpu, cuda or opencl")->capture_default_str();
  command
      ->add_option("--compute-capability", config.compute_capability,
                   "CUDA: 10*major + minor, e.g. 90")
      ->transform(whole_number(1000))
      ->capture_default_str();
  const CLI::Validator size = whole_number(std::uint64_t{1} << 31);
  command->add_option("--head-size", config.head_size, "Of queries and keys")
      ->transform(size)
      ->capture_default_str();
  command->add_option("--head-size-v", config.head_size_v, "Of values; by default the head size")
      ->transform(size);
  command->add_option("--dtype", options->dtype, "f32, f16, bf16, f8e4m3 or f8e5m2")
      ->capture_default_str();
  command->add_option("--kv-cache-dtype", options->kv_cache_dtype,
                      "auto (the dtype), or one of those");
  command->add_option("--block-size", options->block_size, "Tokens a cache block; by default free")
      ->transform(size);
  command
      ->add_option("--attn-type", options->attn_type,
                   "decoder, encoder, encoder_only or encoder_decoder")
      ->capture_default_str();
  command->add_flag("--mla", config.use_mla, "Multi-head latent attention");
  command->add_flag("--sinks", config.has_sinks, "Attention sinks");
  command->add_flag("--sliding-window", config.has_sliding_window, "A sliding window");
  command->add_flag("--soft-cap", config.has_soft_cap, "A soft cap on the logits");
  command->add_flag("--alibi", config.has_alibi, "ALiBi slopes");
  command->add_flag("--custom-score", config.has_custom_score, "A user's own score or mask");
  command->add_flag("--non-causal", config.use_non_causal,
                    "Bidirectional attention over the cache");
  command->add_flag("--lse", config.needs_lse, "The log-sum-exp must be returned");
  command
      ->add_option("--graphs", options->graphs,
                   "Least graph support: never, uniform_single_token_decode, uniform_batch, always")
      ->capture_default_str();
  command
      ->add_option("--dcp", config.decode_context_parallel_size,
                   "Ranks of decode context parallelism")
      ->transform(size)
      ->capture_default_str();
  command
      ->add_option("--pcp", config.prefill_context_parallel_size,
                   "Ranks of prefill context parallelism")
      ->transform(size)
      ->capture_default_str();
  command->add_flag("--batch-invariant", config.batch_invariant,
                    "Results must not depend on the batch");
  command->add_option("--backend", config.backend,
                      "Ask for this backend (see 'foveal info'); by default auto");
  command->add_flag("--json", options->json, "Print JSON");
  command->footer(
      "Exits with 0 when a backend can serve, 1 when none can.\n\nExamples:\n"
      "  foveal select --head-size 64 --dtype f16 --kv-cache-dtype fp8 --sinks\n"
      "  foveal select --head-size 576 --head-size-v 512 --mla --backend REFERENCE_MLA --json");
  command->callback([options, &exit_code] { exit_code = run_select(*options); });
  return command;
}

}  // namespace foveal::tools
