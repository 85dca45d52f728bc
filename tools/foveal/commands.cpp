#include "foveal/commands.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace foveal::tools {
namespace fs = std::filesystem;

namespace {

template <typename T>
T parsed(std::optional<T> value, const std::string& flag, const std::string& text,
         std::string_view accepted) {
  if (!value) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is '{}', accepted are {}", flag, text, accepted));
  }
  return *value;
}

[[noreturn]] void fail_to_write(const std::string& flag, const std::string& path) {
  throw Error(ErrorCode::io, fmt::format("{} {} could not be written", flag, path));
}

}  // namespace

DType parse_dtype(const std::string& flag, const std::string& value) {
  std::optional<DType> dtype = dtype_from_string(value);
  if (dtype && !is_float(*dtype)) {
    dtype.reset();
  }
  return parsed(dtype, flag, value, "f32, f16, bf16, f8e4m3, f8e5m2");
}

AttnType parse_attn_type(const std::string& flag, const std::string& value) {
  return parsed(attn_type_from_string(value), flag, value,
                "decoder, encoder, encoder_only, encoder_decoder");
}

GraphSupport parse_graph_support(const std::string& flag, const std::string& value) {
  return parsed(graph_support_from_string(value), flag, value,
                "never, uniform_single_token_decode, uniform_batch, always");
}

DeviceType parse_device(const std::string& flag, const std::string& value) {
  std::optional<DeviceType> device;
  for (const DeviceType known : {DeviceType::cpu, DeviceType::cuda, DeviceType::opencl}) {
    if (to_string(known) == value) {
      device = known;
    }
  }
  return parsed(device, flag, value, "cpu, cuda, opencl");
}

CLI::Validator whole_number(std::uint64_t max) {
  const auto parse = [max](std::string& text) -> std::string {
    std::uint64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value > max) {
      return fmt::format("is '{}', accepted are whole numbers from 0 to {}", text, max);
    }
    // CLI11 would take leading zeros for octal.
    text = std::to_string(value);
    return {};
  };
  return {parse, "", "WHOLE"};
}

void require_writable(const std::string& flag, const std::string& path) {
  std::error_code error;
  const fs::path target = fs::weakly_canonical(path, error);
  const fs::file_status status = fs::status(target, error);
  const bool exists = fs::exists(status);
  const bool writable =
      exists ? !fs::is_directory(status) && access(target.c_str(), W_OK) == 0 : !path.empty();
  const fs::path folder = target.parent_path();
  if (!writable ||
      ((!exists || fs::is_regular_file(status)) && access(folder.c_str(), W_OK | X_OK) != 0)) {
    fail_to_write(flag, path);
  }
}

void write_file(const std::string& flag, const std::string& path, const std::string& text) {
  require_writable(flag, path);
  std::error_code error;
  const fs::path target = fs::weakly_canonical(path, error);  // A link stays one.
  const fs::file_status status = fs::status(target, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {  // A device or a pipe is written to.
    std::ofstream file(target);
    file << text << '\n' << std::flush;
    if (!file) {
      fail_to_write(flag, path);
    }
    return;
  }
  std::string beside = target.string() + ".XXXXXX";
  const int descriptor = mkstemp(beside.data());
  if (descriptor < 0) {
    fail_to_write(flag, path);
  }
  close(descriptor);
  std::ofstream file(beside);
  file << text << '\n';
  file.close();
  // mkstemp leaves others nothing; a new file gets what is usual.
  constexpr fs::perms kUsual{0644};
  fs::permissions(beside, fs::exists(status) ? status.permissions() : kUsual, error);
  if (file) {
    fs::rename(beside, target, error);
  }
  if (!file || error) {
    fs::remove(beside, error);
    fail_to_write(flag, path);
  }
}

void require_different_files(const std::string& flag, const std::string& path,
                             const std::string& other_name, const std::string& other) {
  std::error_code error;
  if (!path.empty() && !other.empty() &&
      fs::weakly_canonical(path, error) == fs::weakly_canonical(other, error)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is {}, that is {} too", flag, path, other_name));
  }
}

void print_stderr(std::string_view text) noexcept {
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
  static_cast<void>(std::fflush(stderr));
}

ProgressLine::ProgressLine() : on_terminal_(isatty(STDERR_FILENO) == 1) {}

void ProgressLine::show(const std::string& text) const {
  if (on_terminal_) {
    print_stderr(fmt::format("\r{:100}\r{}", "", text.substr(0, 100)));
  }
}

}  // namespace foveal::tools
