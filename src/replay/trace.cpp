#include "replay/trace.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"
#include "core/json_text.h"
#include "serving/json.h"
#include "serving/mapped_file.h"

namespace foveal::replay {
namespace {

constexpr std::string_view kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
/// Positions are int32 in the engine's tables.
constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();

/// A moment, in two parts: seconds since 1970 leave a double too few digits for fractions.
struct Moment {
  std::int64_t seconds = 0;
  double fraction = 0.0;
};

double seconds_between(const Moment& from, const Moment& to) {
  return static_cast<double>(to.seconds - from.seconds) + (to.fraction - from.fraction);
}

/// What is wrong with a line; the caller knows which it is.
struct Malformed {
  std::string what;
};

template <typename... Args>
[[noreturn]] void malformed(fmt::format_string<Args...> format, Args&&... args) {
  throw Malformed{fmt::format(format, std::forward<Args>(args)...)};
}

/// Text as a message shows it: short and printable.
std::string shown(std::string_view text) {
  return serving::describe_json(nlohmann::json(std::string(text.substr(0, 200))));
}

/// Digits and nothing else.
std::optional<std::int64_t> digits(std::string_view text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || text.front() < '0' || text.front() > '9' || error != std::errc() ||
      stop != end) {
    return std::nullopt;
  }
  return value;
}

std::int64_t checked_length(std::string_view name, std::int64_t value) {
  if (value < 1 || value > kMaxLength) {
    malformed("{} is {}; it must be from 1 to {}", name, value, kMaxLength);
  }
  return value;
}

void check_total(const TraceRequest& request) {
  if (request.total_length() > kMaxLength) {
    malformed("{} tokens of prompt and answer; a sequence may have {}", request.total_length(),
              kMaxLength);
  }
}

/// Reads "2023-11-16 18:17:03.9799600": the fraction may be missing, and an offset from UTC
/// (+00:00) or a Z may follow.
class TimestampReader {
 public:
  explicit TimestampReader(std::string_view text) : text_(text), rest_(text) {}

  Moment read() {
    const std::int64_t year = number(4, 0, 9999);
    expect('-');
    const std::int64_t month = number(2, 1, 12);
    expect('-');
    const std::int64_t day = number(2, 1, 31);
    expect(' ');
    const std::int64_t hour = number(2, 0, 23);
    expect(':');
    const std::int64_t minute = number(2, 0, 59);
    expect(':');
    const std::int64_t second = number(2, 0, 60);
    const double fraction = read_fraction();
    const std::int64_t offset = read_offset();
    const std::chrono::year_month_day date(std::chrono::year(static_cast<int>(year)),
                                           std::chrono::month(static_cast<unsigned>(month)),
                                           std::chrono::day(static_cast<unsigned>(day)));
    if (!rest_.empty() || !date.ok()) {
      refuse();
    }
    const std::int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
    return {((days * 24 + hour) * 60 + minute - offset) * 60 + second, fraction};
  }

 private:
  [[noreturn]] void refuse() const {
    malformed("TIMESTAMP is {}; it must be like 2023-11-16 18:17:03.9799600", shown(text_));
  }

  void expect(char c) {
    if (!rest_.starts_with(c)) {
      refuse();
    }
    rest_.remove_prefix(1);
  }

  std::int64_t number(std::size_t width, std::int64_t low, std::int64_t high) {
    const std::optional<std::int64_t> value = digits(rest_.substr(0, width));
    if (rest_.size() < width || !value || *value < low || *value > high) {
      refuse();
    }
    rest_.remove_prefix(width);
    return *value;
  }

  double read_fraction() {
    if (!rest_.starts_with('.')) {
      return 0.0;
    }
    rest_.remove_prefix(1);
    const std::size_t width = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
    const std::optional<std::int64_t> value = digits(rest_.substr(0, width));
    if (!value) {
      refuse();
    }
    rest_.remove_prefix(width);
    return static_cast<double>(*value) / std::pow(10.0, static_cast<double>(width));
  }

  /// Minutes east of UTC.
  std::int64_t read_offset() {
    if (rest_ == "Z") {
      rest_ = {};
    }
    if (rest_.empty()) {
      return 0;
    }
    const std::int64_t sign = rest_.starts_with('-') ? -1 : 1;
    expect(sign < 0 ? '-' : '+');
    const std::int64_t hours = number(2, 0, 14);
    expect(':');
    return sign * (hours * 60 + number(2, 0, 59));
  }

  std::string_view text_;
  std::string_view rest_;
};

Moment parse_azure(std::string_view line, TraceRequest& request) {
  const std::size_t first = line.find(',');
  const std::size_t second = first == std::string_view::npos ? first : line.find(',', first + 1);
  if (second == std::string_view::npos || line.find(',', second + 1) != std::string_view::npos) {
    malformed("{} does not have the three fields {}", shown(line), kAzureHeader);
  }
  const auto length = [](std::string_view name, std::string_view field) {
    const std::optional<std::int64_t> value = digits(field);
    if (!value) {
      malformed("{} is {}; it must be a whole number", name, shown(field));
    }
    return checked_length(name, *value);
  };
  const Moment arrival = TimestampReader(line.substr(0, first)).read();
  request.input_length = length("ContextTokens", line.substr(first + 1, second - first - 1));
  request.output_length = length("GeneratedTokens", line.substr(second + 1));
  return arrival;
}

const nlohmann::json& member(const nlohmann::json& object, const std::string& key) {
  const nlohmann::json* value = serving::find_member(object, key);
  if (value == nullptr) {
    malformed("{} is missing", key);
  }
  return *value;
}

std::int64_t length_member(const nlohmann::json& object, const std::string& key) {
  const nlohmann::json& value = member(object, key);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMaxLength) {
    malformed("{} is {}; it must be a whole number from 1 to {}", key,
              serving::describe_json(value), kMaxLength);
  }
  return checked_length(key, value.get<std::int64_t>());
}

/// `where` names the line in messages about its JSON.
Moment parse_mooncake(std::string_view line, const std::string& where, TraceRequest& request) {
  const nlohmann::json object = parse_json(line, where);
  if (!object.is_object()) {
    malformed("{} is not a JSON object", shown(line));
  }
  const nlohmann::json& timestamp = member(object, "timestamp");
  // Below 2^53 ms a double holds them exactly.
  constexpr double kMaxMilliseconds = 9007199254740992.0;
  const double milliseconds = timestamp.is_number() ? timestamp.get<double>() : -1.0;
  if (!(milliseconds >= 0.0 && milliseconds <= kMaxMilliseconds)) {
    malformed("timestamp is {}; it must be milliseconds, 0 or more",
              serving::describe_json(timestamp));
  }
  request.input_length = length_member(object, "input_length");
  request.output_length = length_member(object, "output_length");
  const nlohmann::json& ids = member(object, "hash_ids");
  const std::int64_t wanted = (request.input_length + kTokensPerHashId - 1) / kTokensPerHashId;
  if (!ids.is_array() || static_cast<std::int64_t>(ids.size()) != wanted) {
    malformed(
        "hash_ids is {}; it must be a list of {} ids, one for each {} of input_length {}",
        ids.is_array() ? fmt::format("a list of {}", ids.size()) : serving::describe_json(ids),
        wanted, kTokensPerHashId, request.input_length);
  }
  for (const nlohmann::json& id : ids) {
    if (!id.is_number_unsigned()) {
      malformed("hash_ids holds {}; they must be whole numbers, 0 or more",
                serving::describe_json(id));
    }
    request.hash_ids.push_back(id.get<std::uint64_t>());
  }
  const double seconds = std::floor(milliseconds / 1000.0);
  return {static_cast<std::int64_t>(seconds), milliseconds / 1000.0 - seconds};
}

TraceFormat recognised(std::string_view first_line, std::string_view name) {
  if (first_line == kAzureHeader) {
    return TraceFormat::azure;
  }
  if (first_line.starts_with('{')) {
    return TraceFormat::mooncake;
  }
  fail(
      ErrorCode::io,
      "{}: line 1: {} begins no trace that is known; accepted are Azure's CSV, with the header {}, "
      "and Mooncake's JSON lines, an object a line with timestamp, input_length, output_length and "
      "hash_ids",
      name, shown(first_line), kAzureHeader);
}

/// Lines of a text, without their ends.
class Lines {
 public:
  explicit Lines(std::string_view text) : rest_(text) {}

  bool next(std::string_view& line) {
    if (rest_.empty()) {
      return false;
    }
    const std::size_t end = std::min(rest_.find('\n'), rest_.size());
    line = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    ++number_;
    return true;
  }
  std::int64_t number() const { return number_; }
  /// Whether nothing but ends of lines follows.
  bool only_empty_follow() const {
    return rest_.find_first_not_of("\r\n") == std::string_view::npos;
  }

 private:
  std::string_view rest_;
  std::int64_t number_ = 0;
};

}  // namespace

std::string_view to_string(TraceFormat format) {
  return format == TraceFormat::azure ? "azure" : "mooncake";
}

Trace parse_trace(std::string_view text, std::string_view name) {
  if (text.starts_with(kByteOrderMark)) {
    text.remove_prefix(kByteOrderMark.size());
  }
  Lines lines(text);
  std::string_view line;
  if (!lines.next(line)) {
    fail(ErrorCode::io, "{}: is empty; a trace holds a request a line", name);
  }
  Trace trace;
  trace.name = name;
  trace.format = recognised(line, name);
  bool more = trace.format == TraceFormat::mooncake || lines.next(line);

  std::vector<Moment> arrivals;
  for (; more && !(line.empty() && lines.only_empty_follow()); more = lines.next(line)) {
    TraceRequest& request = trace.requests.emplace_back();
    request.line = lines.number();
    const std::string where = fmt::format("{}: line {}", name, request.line);
    try {
      arrivals.push_back(trace.format == TraceFormat::azure ? parse_azure(line, request)
                                                            : parse_mooncake(line, where, request));
      check_total(request);
    } catch (const Malformed& error) {
      fail(ErrorCode::io, "{}: {}", where, error.what);
    }
  }
  if (trace.requests.empty()) {
    fail(ErrorCode::io, "{}: holds no request, only a header", name);
  }

  const Moment first = *std::ranges::min_element(
      arrivals, [](const Moment& a, const Moment& b) { return seconds_between(a, b) > 0.0; });
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    trace.requests[i].arrival_s = seconds_between(first, arrivals[i]);
  }
  std::ranges::stable_sort(trace.requests, {}, &TraceRequest::arrival_s);
  return trace;
}

Trace read_trace(const std::filesystem::path& path) {
  const serving::MappedFile file(path);
  const auto bytes = file.bytes();
  return parse_trace({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, file.name());
}

}  // namespace foveal::replay
