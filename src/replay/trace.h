#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

// Serving traces: when requests came, how long their prompts and answers were and, in some, which
// prompts begin alike. docs/replay.md describes the formats.
namespace foveal::replay {

enum class TraceFormat : std::uint8_t {
  azure,     ///< CSV: TIMESTAMP,ContextTokens,GeneratedTokens.
  mooncake,  ///< A JSON object a line: timestamp, input_length, output_length, hash_ids.
};

std::string_view to_string(TraceFormat format);

/// Tokens that one of Mooncake's hash ids stands for.
inline constexpr std::int64_t kTokensPerHashId = 512;

struct TraceRequest {
  std::int64_t line = 0;   ///< Of the file, from 1.
  double arrival_s = 0.0;  ///< After the trace's first request.
  std::int64_t input_length = 0;
  std::int64_t output_length = 0;
  /// One for each kTokensPerHashId tokens of the prompt, the last of which may be fewer: equal ids
  /// are equal tokens behind equal prefixes. Empty where the format has none: then no two prompts
  /// begin alike.
  std::vector<std::uint64_t> hash_ids{};

  std::int64_t total_length() const { return input_length + output_length; }
};

struct Trace {
  std::string name{};  ///< Of the file, or what parse_trace was told.
  TraceFormat format = TraceFormat::azure;
  std::vector<TraceRequest> requests;  ///< In order of arrival; those of one time as in the file.
};

/// Parses a whole trace; which format it is, its first line tells. Throws io, "NAME: line N: …",
/// for a line that is not as the format has it, and for a text without requests.
Trace parse_trace(std::string_view text, std::string_view name = "trace");

/// The same of a file; throws io too when it cannot be read.
Trace read_trace(const std::filesystem::path& path);

}  // namespace foveal::replay
