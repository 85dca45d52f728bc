#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "foveal/commands.h"

namespace {

constexpr const char* kFooter = R"(Examples:
  foveal generate --prompt "Explain attention in one sentence."
  foveal select --head-size 128 --dtype bf16 --sinks
  foveal run problem.safetensors --backend CPU_ATTN
  foveal bench decode --device cuda
  foveal replay mooncake_trace.jsonl --requests 40 --html replay.html
  foveal info

`foveal COMMAND --help` tells more about each.)";

/// Keeps files that are opened later from taking the place of a closed standard stream. stdout is
/// made one that cannot be written, so that lost results are noticed.
void occupy_standard_streams() {
  while (true) {
    const int file = open("/dev/null", O_RDWR);
    if (file < 0 || file > STDERR_FILENO) {
      if (file >= 0) {
        close(file);
      }
      return;
    }
    if (file == STDOUT_FILENO) {
      const int unwritable = open("/dev/null", O_RDONLY);
      if (unwritable >= 0) {
        dup2(unwritable, STDOUT_FILENO);
        if (unwritable > STDERR_FILENO) {
          close(unwritable);
        }
      }
    }
  }
}

/// Whether all that was printed has arrived.
bool stdout_written() {
  const bool flushed = std::fflush(stdout) == 0;
  return flushed && std::ferror(stdout) == 0;
}

int run(CLI::App& app, int argc, char** argv, const int& exit_code) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::RequiredError) &&
        app.get_subcommands().empty() && !unknown.empty()) {
      foveal::tools::print_stderr(
          fmt::format("foveal: '{}' is no command; 'foveal --help' lists them\n", unknown.front()));
      return 2;
    }
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const foveal::Error& error) {
    foveal::tools::print_stderr(
        fmt::format("foveal: {}: {}\n", foveal::to_string(error.code()), error.what()));
    return 1;
  } catch (const std::exception& error) {
    foveal::tools::print_stderr(fmt::format("foveal: {}\n", error.what()));
    return 1;
  }
  return exit_code;
}

}  // namespace

namespace foveal::tools {

int run_cli(int argc, char** argv) try {
  occupy_standard_streams();
  // stdout carries results only.
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "foveal", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()));
  spdlog::set_pattern("%^%l%$: %v");

  CLI::App app("The attention layer of an LLM inference engine.", "foveal");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string(version()));

  int exit_code = 0;
  add_generate_command(app, exit_code);
  add_run_command(app, exit_code);
  add_bench_command(app, exit_code);
  add_replay_command(app, exit_code);
  add_select_command(app, exit_code);
  add_info_command(app, exit_code);
  add_cache_command(app, exit_code);
  add_prebuild_command(app, exit_code);
  const int status = run(app, argc, argv, exit_code);
  if (!stdout_written() && status == 0) {
    print_stderr("foveal: stdout could not be written\n");
    return 1;
  }
  return status;
} catch (...) {  // Commands report their errors themselves.
  std::fputs("foveal: could not start\n", stderr);
  return 1;
}

}  // namespace foveal::tools
