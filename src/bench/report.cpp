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
  const std::string batch = s.decodes > 0 ? fmt::format("{}+{}", s.decodes, s.batch - s.decodes)
                                          : std::to_string(s.batch);
  const std::string queries =
      s.decodes > 0 ? fmt::format("1, {}", s.q_len) : std::to_string(s.q_len);
  const std::string size = s.value_size() == s.head_size
                               ? std::to_string(s.head_size)
                               : fmt::format("{}/{}", s.head_size, s.value_size());
  return fmt::format("{:>5} {:>7} {:>7}  {:>7} {:>7}  {:<6}  {:<8}  {:<11}  {:<12}", batch, queries,
                     s.kv_len, fmt::format("{}/{}", s.num_heads, s.num_kv_heads), size,
                     s.causal ? "causal" : "full", keys_text(s), dtype_text(s), row.backend);
}

std::string times_columns(const Times& times) {
  return fmt::format(" {:>10.1f} {:>10.1f} {:>10.1f}", times.median_us, times.min_us, times.p90_us);
}

/// What is needed of the machine, and how much of the bound is reached.
std::string roofline_columns(const Report& report, const Row& row) {
  const std::optional<Roofline> roof = roofline(report.ceilings, row);
  return roof ? fmt::format(" {:>8} {:>6.1f}%", roof->compute_bound ? "compute" : "memory",
                            100 * roof->fraction)
              : fmt::format(" {:>8} {:>7}", "-", "-");
}

/// What the JSON calls the other way of a kind.
std::string other_name(Kind kind) { return kind == Kind::naive ? "naive" : "without_cascade"; }

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
            {"decodes", s.decodes},
            {"prefix_len", s.prefix_len},
            {"num_heads", s.num_heads},
            {"num_kv_heads", s.num_kv_heads},
            {"head_size", s.head_size},
            {"head_size_v", s.value_size()},
            {"causal", s.causal},
            {"block_size", s.block_size},
            {"dtype", to_string(s.dtype)},
            {"kv_cache_dtype", to_string(s.kv_cache_dtype)},
            {"backend", row.backend}};
  json.update(json_of(row.attention));
  json["flops"] = s.flops();
  json["least_bytes"] = s.least_bytes();
  if (row.tflops() > 0) {
    json["tflops"] = row.tflops();
  }
  if (row.gigabytes_per_second() > 0) {
    json["gb_per_s"] = row.gigabytes_per_second();
  }
  if (const std::optional<Roofline> roof = roofline(report.ceilings, row)) {
    json["roofline"] = {{"bound", roof->compute_bound ? "compute" : "memory"},
                        {"bound_us", roof->bound_us},
                        {"fraction", roof->fraction}};
  }
  if (row.build_us) {
    json["build_us"] = *row.build_us;
  }
  if (row.forward_us) {
    json["forward_us"] = *row.forward_us;
  }
  if (row.other) {
    Json& other = json[other_name(s.kind)] = json_of(*row.other);
    if (row.other_ratio() > 0) {
      other["ratio"] = row.other_ratio();
    }
  }
  return json;
}

}  // namespace

std::string header_text(const Report& report) {
  const Ceilings& ceilings = report.ceilings;
  std::string text =
      fmt::format("foveal {} on {}: {}\na plain sum reads {:.1f} GB/s; {}\n", version(),
                  to_string(report.device), report.machine, ceilings.read_gb_per_s,
                  ceilings.products ? fmt::format("products: {:.4g} TFLOP/s, {}",
                                                  ceilings.products->tflops, ceilings.products->how)
                                    : fmt::format("no roofline: {}", ceilings.no_products));
  for (const std::string& kind : report.left_out) {
    text += fmt::format("left out: {}\n", kind);
  }
  return text;
}

std::string table_header(Kind kind) {
  std::string header = fmt::format(
      "\n{}\n{:>5} {:>7} {:>7}  {:>7} {:>7}  {:<6}  {:<8}  {:<11}  {:<12}", to_string(kind),
      "batch", "queries", "keys", "heads", "size", "mask", "keys in", "dtype", "backend");
  const std::string roof = fmt::format(" {:>8} {:>7}", "bound by", "of roof");
  switch (kind) {
    case Kind::naive:
      return header + fmt::format(" {:>12} {:>12} {:>6} {:>10} {:>10}{}\n", "attention us",
                                  "naive us", "ratio", "extra MiB", "naive MiB", roof);
    case Kind::cascade:
      return header + fmt::format(" {:>12} {:>12} {:>6} {:>8}{}\n", "cascade us", "without us",
                                  "ratio", "shared", roof);
    default:
      break;
  }
  header += fmt::format(" {:>10} {:>10} {:>10}", "median us", "min", "p90");
  switch (kind) {
    case Kind::decode:
      return header +
             fmt::format(" {:>8}{} {:>9} {:>10}\n", "GB/s", roof, "build us", "forward us");
    case Kind::cache_write:
      return header + fmt::format(" {:>8}{}\n", "GB/s", roof);
    default:
      return header + fmt::format(" {:>8}{}\n", "TFLOP/s", roof);
  }
}

std::string table_line(const Report& report, const Row& row) {
  std::string line = shape_columns(row);
  if (!row.attention.failure.empty()) {
    return fmt::format("{} {}\n", line, row.attention.failure);
  }
  const std::string roof = roofline_columns(report, row);
  if (row.other) {
    const Measurement& other = *row.other;
    const bool timed = other.failure.empty();
    line += fmt::format(" {:>12.1f} {:>12} {:>6}", row.attention.times.median_us,
                        timed ? fmt::format("{:.1f}", other.times.median_us) : "-",
                        timed ? fmt::format("{:.2f}", row.other_ratio()) : "-");
    line += row.shape.kind == Kind::cascade
                ? fmt::format(" {:>8}", row.shape.prefix_len)
                : fmt::format(" {:>10.1f} {:>10.1f}",
                              static_cast<double>(row.attention.extra_bytes) / kMiB,
                              static_cast<double>(other.extra_bytes) / kMiB);
    return fmt::format("{}{}{}{}\n", line, roof, timed ? "" : "  ", other.failure);
  }
  line += times_columns(row.attention.times);
  switch (row.shape.kind) {
    case Kind::decode:
      return line + fmt::format(" {:>8.1f}{} {:>9.1f} {:>10}\n", row.gigabytes_per_second(), roof,
                                row.build_us.value_or(0),
                                row.forward_us ? fmt::format("{:.1f}", *row.forward_us) : "-");
    case Kind::cache_write:
      return line + fmt::format(" {:>8.1f}{}\n", row.gigabytes_per_second(), roof);
    default:
      // A CPU is far from a TFLOP/s.
      return line + fmt::format(" {:>8}{}\n", fmt::format("{:.4g}", row.tflops()), roof);
  }
}

std::string to_json(const Report& report) {
  const Ceilings& ceilings = report.ceilings;
  Json json{{"version", version()},
            {"device", to_string(report.device)},
            {"machine", report.machine},
            {"read_gb_per_s", ceilings.read_gb_per_s}};
  if (ceilings.products) {
    json["product_tflops"] = ceilings.products->tflops;
    json["products"] = ceilings.products->how;
  } else {
    json["product_tflops"] = nullptr;
    json["products"] = ceilings.no_products;
  }
  json["left_out"] = report.left_out;
  json["rows"] = Json::array();
  for (const Row& row : report.rows) {
    json["rows"].push_back(json_of(report, row));
  }
  return json.dump(2);
}

}  // namespace foveal::bench
