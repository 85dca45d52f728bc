#include "foveal/commands.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace foveal::tools {
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

std::string beside(const std::string& path) { return path + ".partial"; }

[[noreturn]] void fail_to_write(const std::string& flag, const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove(beside(path), ignored);
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
  if (!std::ofstream(beside(path)) || std::filesystem::is_directory(path, error)) {
    fail_to_write(flag, path);
  }
  std::filesystem::remove(beside(path), error);
}

void write_file(const std::string& flag, const std::string& path, const std::string& text) {
  std::ofstream file(beside(path));
  file << text << '\n';
  file.close();
  std::error_code error;
  if (file) {
    std::filesystem::rename(beside(path), path, error);
  }
  if (!file || error) {
    fail_to_write(flag, path);
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
