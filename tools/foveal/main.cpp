#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <exception>

#include "foveal/commands.h"

namespace {

constexpr const char* kFooter = R"(Examples:
  foveal generate --prompt "Explain attention in one sentence."
  foveal select --head-size 128 --dtype bf16 --sinks
  foveal run problem.safetensors --backend CPU_ATTN
  foveal info

`foveal COMMAND --help` tells more about each.)";

}  // namespace

int main(int argc, char** argv) {
  // stdout carries results only.
  spdlog::set_default_logger(spdlog::stderr_color_mt("foveal"));
  spdlog::set_pattern("%^%l%$: %v");

  CLI::App app("The attention layer of an LLM inference engine.", "foveal");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string(foveal::version()));

  int exit_code = 0;
  foveal::tools::add_generate_command(app, exit_code);
  foveal::tools::add_run_command(app, exit_code);
  foveal::tools::add_select_command(app, exit_code);
  foveal::tools::add_info_command(app, exit_code);
  foveal::tools::add_cache_command(app, exit_code);
  foveal::tools::add_prebuild_command(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const foveal::Error& error) {
    fmt::print(stderr, "foveal: {}: {}\n", foveal::to_string(error.code()), error.what());
    return 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "foveal: {}\n", error.what());
    return 1;
  }
  return exit_code;
}
