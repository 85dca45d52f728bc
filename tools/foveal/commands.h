#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "foveal/foveal.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

// The subcommands of `foveal`, one file each. Each function adds its subcommand, whose callback
// sets exit_code; errors are thrown and reported by run_cli.
namespace foveal::tools {

/// The whole program: its exit code is 0 only when the command succeeded.
int run_cli(int argc, char** argv);

CLI::App* add_bench_command(CLI::App& app, int& exit_code);
CLI::App* add_cache_command(CLI::App& app, int& exit_code);
CLI::App* add_generate_command(CLI::App& app, int& exit_code);
CLI::App* add_info_command(CLI::App& app, int& exit_code);
CLI::App* add_prebuild_command(CLI::App& app, int& exit_code);
CLI::App* add_replay_command(CLI::App& app, int& exit_code);
CLI::App* add_run_command(CLI::App& app, int& exit_code);
CLI::App* add_select_command(CLI::App& app, int& exit_code);

/// A value of a command-line flag as an enum; throws invalid_argument naming the flag, the value
/// and what is accepted.
DType parse_dtype(const std::string& flag, const std::string& value);
AttnType parse_attn_type(const std::string& flag, const std::string& value);
GraphSupport parse_graph_support(const std::string& flag, const std::string& value);
DeviceType parse_device(const std::string& flag, const std::string& value);

/// For Option::transform: a decimal number from 0 to `max`. CLI11 itself wraps negative numbers and
/// clips large ones.
CLI::Validator whole_number(std::uint64_t max);

/// Writes text and an end of line into a file: beside it first, so that what it held stays when
/// there is no room. A link's target is written, a device or a pipe as it is. Throws io, naming the
/// flag that the path was given with.
void write_file(const std::string& flag, const std::string& path, const std::string& text);

/// Throws as write_file does when the file could not be written now: before long work for it.
void require_writable(const std::string& flag, const std::string& path);
/// Throws invalid_argument when a file to be written is another one, of the name `other_name`.
void require_different_files(const std::string& flag, const std::string& path,
                             const std::string& other_name, const std::string& other);

/// Writes to stderr; that it cannot be written is ignored, for there is nobody left to tell.
void print_stderr(std::string_view text) noexcept;

/// Shows on a terminal what is being done, until cleared.
class ProgressLine {
 public:
  ProgressLine();
  void show(const std::string& text) const;
  void clear() const { show(""); }

 private:
  bool on_terminal_;
};

}  // namespace foveal::tools
