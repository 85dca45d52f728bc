#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "foveal/version.h"

namespace foveal::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMiB = 1 << 20;

std::string dtype_text(const Shape& shape) {
  return shape.kv_cache_dtype == shape.dtype
             ? std::string(to_string(shape.dtype))
             : fmt::format("{}/{}", to_string(shape.dtype), to_string(shape.kv_cache_dtype));
}

std::string keys_text(const Shape& shape) {
  return shape.block_size == 0 ? "plain" : fmt::format("paged {}", shape.block_size);
}

/// The columns that every table begins with.
std::string shape_columns(const Row& row) {
  const Shape& s = row.shape;
  return fmt::format("{:>5} {:>7} {:>7}  {:>7} {:>4}  {:<6}  {:<8}  {:<11}  {:<12}", s.batch,
                     s.q_len, s.kv_len, fmt::format("{}/{}", s.num_heads, s.num_kv_heads),
                     s.head_size, s.causal ? "causal" : "full", keys_text(s), dtype_text(s),
                     row.backend);
}

std::string times_columns(const Times& times) {
  return fmt::format(" {:>10.1f} {:>10.1f} {:>10.1f}", times.median_us, times.min_us, times.p90_us);
}

double fraction(const Report& report, const Row& row) {
  return row.gigabytes_per_second() / report.read_bandwidth.value_or(0);
}

Json json_of(const Measurement& measurement) {
  Json json;
  if (!measurement.failure.empty()) {
    json["failure"] = measurement.failure;
  } else {
    json["median_us"] = measurement.times.median_us;
    json["min_us"] = measurement.times.min_us;
    json["p90_us"] = measurement.times.p90_us;
    json["repeats"] = measurement.times.count;
    json["relative_error"] = measurement.relative_error;
  }
  json["extra_bytes"] = measurement.extra_bytes;
  return json;
}

Json json_of(const Report& report, const Row& row) {
  const Shape& s = row.shape;
  Json json{{"kind", to_string(s.kind)},
            {"batch", s.batch},
            {"q_len", s.q_len},
            {"kv_len", s.kv_len},
            {"num_heads", s.num_heads},
            {"num_kv_heads", s.num_kv_heads},
            {"head_size", s.head_size},
            {"causal", s.causal},
            {"block_size", s.block_size},
            {"dtype", to_string(s.dtype)},
            {"kv_cache_dtype", to_string(s.kv_cache_dtype)},
            {"backend", row.backend}};
  json.update(json_of(row.attention));
  if (s.kind != Kind::cache_write) {
    json["flops"] = s.flops();
  }
  if (row.tflops() > 0) {
    json["tflops"] = row.tflops();
  }
  if (row.gigabytes_per_second() > 0) {
    json["gb_per_s"] = row.gigabytes_per_second();
  }
  if (s.kind == Kind::decode && row.attention.failure.empty()) {
    json["read_fraction"] = fraction(report, row);
    json["build_us"] = row.build_us.value_or(0);
    if (row.forward_us) {
      json["forward_us"] = *row.forward_us;
    }
  }
  if (row.naive) {
    json["naive"] = json_of(*row.naive);
    if (row.naive_ratio() > 0) {
      json["naive"]["ratio"] = row.naive_ratio();
    }
  }
  return json;
}

}  // namespace

std::string header_text(const Report& report) {
  std::string text =
      fmt::format("foveal {} on {}: {}\n", version(), to_string(report.device), report.machine);
  if (report.read_bandwidth) {
    text += fmt::format("a plain sum reads {:.1f} GB/s\n", *report.read_bandwidth);
  }
  return text;
}

std::string table_header(Kind kind) {
  std::string header = fmt::format(
      "\n{}\n{:>5} {:>7} {:>7}  {:>7} {:>4}  {:<6}  {:<8}  {:<11}  {:<12}", to_string(kind),
      "batch", "queries", "keys", "heads", "size", "mask", "keys in", "dtype", "backend");
  if (kind == Kind::naive) {
    return header + fmt::format(" {:>12} {:>12} {:>6} {:>10} {:>10}\n", "attention us", "naive us",
                                "ratio", "extra MiB", "naive MiB");
  }
  header += fmt::format(" {:>10} {:>10} {:>10}", "median us", "min", "p90");
  switch (kind) {
    case Kind::decode:
      return header + fmt::format(" {:>8} {:>8} {:>9} {:>10}\n", "GB/s", "of read", "build us",
                                  "forward us");
    case Kind::cache_write:
      return header + fmt::format(" {:>8}\n", "GB/s");
    default:
      return header + fmt::format(" {:>8}\n", "TFLOP/s");
  }
}

std::string table_line(const Report& report, const Row& row) {
  std::string line = shape_columns(row);
  if (!row.attention.failure.empty()) {
    return fmt::format("{} {}\n", line, row.attention.failure);
  }
  if (row.naive) {
    const Measurement& naive = *row.naive;
    line += fmt::format(" {:>12.1f}", row.attention.times.median_us);
    const double attention_mib = static_cast<double>(row.attention.extra_bytes) / kMiB;
    const double naive_mib = static_cast<double>(naive.extra_bytes) / kMiB;
    if (naive.failure.empty()) {
      return line + fmt::format(" {:>12.1f} {:>6.2f} {:>10.1f} {:>10.1f}\n", naive.times.median_us,
                                row.naive_ratio(), attention_mib, naive_mib);
    }
    return line + fmt::format(" {:>12} {:>6} {:>10.1f} {:>10.1f}  {}\n", "-", "-", attention_mib,
                              naive_mib, naive.failure);
  }
  line += times_columns(row.attention.times);
  switch (row.shape.kind) {
    case Kind::decode:
      return line + fmt::format(" {:>8.1f} {:>7.1f}% {:>9.1f} {:>10}\n", row.gigabytes_per_second(),
                                100 * fraction(report, row), row.build_us.value_or(0),
                                row.forward_us ? fmt::format("{:.1f}", *row.forward_us) : "-");
    case Kind::cache_write:
      return line + fmt::format(" {:>8.1f}\n", row.gigabytes_per_second());
    default:
      // A CPU is far from a TFLOP/s.
      return line + fmt::format(" {:>8}\n", fmt::format("{:.4g}", row.tflops()));
  }
}

std::string to_json(const Report& report) {
  Json json{{"version", version()},
            {"device", to_string(report.device)},
            {"machine", report.machine},
            {"read_gb_per_s", report.read_bandwidth ? Json(*report.read_bandwidth) : Json(nullptr)},
            {"rows", Json::array()}};
  for (const Row& row : report.rows) {
    json["rows"].push_back(json_of(report, row));
  }
  return json.dump(2);
}

}  // namespace foveal::bench
