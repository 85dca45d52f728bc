// The page of `foveal bench --html`. It is made from the JSON, so that a file that peers were added
// to gives one too.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/bench.h"
#include "core/check.h"
#include "report/html.h"
#include "report/plot.h"

namespace foveal::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kBytesOfMiB = 1 << 20;

double number(const Json& json, const char* field) {
  return json.contains(field) ? json[field].get<double>() : kNone;
}

std::string text_of(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "";
}

std::string failure_of(const Json& json) { return json.value("failure", ""); }

/// A rate or ratio, in three digits.
std::string short_text(double value) {
  return std::isfinite(value) ? report::short_number(value) : "";
}

// ---- what a row is called

std::string heads_text(const Json& row) {
  return fmt::format("{}/{}", row.at("num_heads").get<int>(), row.at("num_kv_heads").get<int>());
}

std::string size_text(const Json& row) {
  const auto size = row.at("head_size").get<int>();
  const auto size_v = row.at("head_size_v").get<int>();
  return size == size_v ? fmt::format("{}", size) : fmt::format("{}/{}", size, size_v);
}

std::string dtype_text(const Json& row) {
  const auto dtype = row.at("dtype").get<std::string>();
  const auto cache = row.at("kv_cache_dtype").get<std::string>();
  return dtype == cache ? dtype : fmt::format("{}/{}", dtype, cache);
}

std::string keys_text(const Json& row) {
  const auto block_size = row.at("block_size").get<int>();
  return block_size == 0 ? "plain" : fmt::format("paged {}", block_size);
}

std::string mask_text(const Json& row) { return row.at("causal").get<bool>() ? "causal" : "full"; }

/// The batch and the lengths.
std::string lengths_text(const Json& row) {
  const auto batch = row.at("batch").get<std::int64_t>();
  const auto queries = row.at("q_len").get<std::int64_t>();
  const auto keys = row.at("kv_len").get<std::int64_t>();
  const auto decodes = row.at("decodes").get<std::int64_t>();
  const auto prefix = row.at("prefix_len").get<std::int64_t>();
  if (decodes > 0) {
    return fmt::format("{} × 1 + {} × {} of {}", decodes, batch - decodes, queries, keys);
  }
  return queries == keys ? fmt::format("{} × {}", batch, keys)
         : prefix > 0    ? fmt::format("{} × {}, {} shared", batch, keys, prefix)
                         : fmt::format("{} × {} of {}", batch, queries, keys);
}

/// What tells a row from the others of its kind.
std::string label(const Json& row) {
  const bool prompt = row.at("kind") == "prefill";
  return fmt::format("{}, {} heads of {}{}{}", lengths_text(row), heads_text(row), size_text(row),
                     prompt ? ", " + mask_text(row) : "",
                     prompt && row.at("block_size") != 0 ? ", paged" : "");
}

// ---- what a kind is measured in

/// GB/s where reading and writing is all there is to it.
bool moves_bytes(const std::string& kind) {
  return kind == "decode" || kind == "cascade" || kind == "cache-write";
}

double rate(const Json& row, const std::string& kind) {
  return number(row, moves_bytes(kind) ? "gb_per_s" : "tflops");
}

std::string rate_name(const std::string& kind) { return moves_bytes(kind) ? "GB/s" : "TFLOP/s"; }

/// The field of the same step another way, and what that is called; empty where there is none.
std::pair<std::string, std::string> other_way(const std::string& kind) {
  return kind == "naive"     ? std::pair("naive", "naive")
         : kind == "cascade" ? std::pair("without_cascade", "without cascade")
                             : std::pair("", "");
}

/// The rows of one kind, as they come.
struct KindRows {
  std::string kind{};
  std::vector<const Json*> rows{};
  std::vector<std::string> peers{};  ///< All that any row has.
};

std::vector<KindRows> by_kind(const Json& rows) {
  std::vector<KindRows> kinds;
  for (const Json& row : rows) {
    const auto kind = row.at("kind").get<std::string>();
    if (kinds.empty() || kinds.back().kind != kind) {
      kinds.push_back({.kind = kind});
    }
    kinds.back().rows.push_back(&row);
    const Json row_peers = row.value("peers", Json::object());
    for (const auto& peer : row_peers.items()) {
      std::vector<std::string>& peers = kinds.back().peers;
      if (std::find(peers.begin(), peers.end(), peer.key()) == peers.end()) {
        peers.push_back(peer.key());
      }
    }
  }
  return kinds;
}

// ---- plots

/// Another way's bar, at the rate that its time stands for.
report::Bar bar_beside(const Json& row, const std::string& kind, const Json& other) {
  if (!other.contains("median_us")) {
    // All of it stands below the table.
    const std::string failure = failure_of(other);
    return {.value = kNone, .text = failure.size() > 24 ? "failed, see below" : failure};
  }
  const double slower = number(other, "median_us") / number(row, "median_us");
  const double value = rate(row, kind) / slower;
  return {.value = value,
          .text = fmt::format("{}, ratio {}", short_text(value), short_text(slower))};
}

std::string throughput(const KindRows& rows) {
  const auto& [field, name] = other_way(rows.kind);
  report::BarChart chart{.title = rows.kind + ": throughput by shape",
                         .x_name = rate_name(rows.kind),
                         .series = {"foveal"}};
  if (!field.empty()) {
    chart.series.push_back(name);
  }
  chart.series.insert(chart.series.end(), rows.peers.begin(), rows.peers.end());
  for (const Json* row : rows.rows) {
    report::BarGroup group{.label = label(*row)};
    const double value = rate(*row, rows.kind);
    group.bars.push_back(
        {.value = value, .text = std::isfinite(value) ? short_text(value) : "failed, see below"});
    if (!field.empty()) {
      group.bars.push_back(bar_beside(*row, rows.kind, row->value(field, Json::object())));
    }
    for (const std::string& peer : rows.peers) {
      const Json peers = row->value("peers", Json::object());
      group.bars.push_back(bar_beside(*row, rows.kind, peers.value(peer, Json::object())));
    }
    chart.groups.push_back(std::move(group));
  }
  return report::bars_svg(chart);
}

std::string fractions(const std::vector<KindRows>& kinds) {
  report::BarChart chart{.title = "Fraction of the roofline by shape",
                         .x_name = "% of what the machine can do",
                         .series = {"foveal"}};
  for (const KindRows& rows : kinds) {
    for (const Json* row : rows.rows) {
      if (row->contains("roofline")) {
        const Json& roof = row->at("roofline");
        const double percent = 100.0 * roof.at("fraction").get<double>();
        chart.groups.push_back(
            {.label = fmt::format("{} {}", rows.kind, label(*row)),
             .bars = {{.value = percent,
                       .text = fmt::format("{:.0f} % of {}", percent,
                                           roof.at("bound").get<std::string>())}}});
      }
    }
  }
  return report::bars_svg(chart);
}

/// The ceilings over the intensity, and where each row stands under them.
std::string roofline_plot(const Json& root, const std::vector<KindRows>& kinds) {
  report::Plot plot{.title = "The roofline",
                    .x_name = "flops for each byte that must be moved",
                    .y_name = "TFLOP/s",
                    .x_log = true,
                    .y_log = true};
  plot.series.push_back({"roofline", {}});
  double least = 1e300;
  double most = 0;
  for (const KindRows& rows : kinds) {
    report::Series series{rows.kind, {}, report::Mark::dot, false};
    for (const Json* row : rows.rows) {
      const double tflops = number(*row, "tflops");
      if (std::isfinite(tflops)) {
        const double intensity =
            row->at("flops").get<double>() / row->at("least_bytes").get<double>();
        least = std::min(least, intensity);
        most = std::max(most, intensity);
        series.points.emplace_back(intensity, tflops);
        series.about.push_back(
            fmt::format("{} {}: {} TFLOP/s", rows.kind, label(*row), short_text(tflops)));
      }
    }
    if (!series.points.empty()) {
      plot.series.push_back(std::move(series));
    }
  }
  const double peak = root.at("product_tflops").get<double>();
  const double slope = root.at("read_gb_per_s").get<double>() / 1e3;  // TFLOP/s a flop a byte.
  const double ridge = peak / slope;
  plot.series.front().points = {
      {std::min(least, ridge) / 2.0, std::min(least, ridge) / 2.0 * slope},
      {ridge, peak},
      {2.0 * std::max(most, ridge), peak}};
  return report::svg(plot);
}

/// Memory beside inputs and output, of attention and of the naive way.
std::string memory(const KindRows& rows) {
  std::map<std::int64_t, std::array<report::Series, 3>> of_batch;
  std::set<double> lens;
  bool attention_takes_some = false;
  for (const Json* row : rows.rows) {
    const auto batch = row->at("batch").get<std::int64_t>();
    const double len = row->at("kv_len").get<double>();
    auto& [attention, naive, wanted] =
        of_batch
            .try_emplace(
                batch,
                std::array<report::Series, 3>{
                    report::Series{
                        fmt::format("attention, batch {}", batch), {}, report::Mark::dot},
                    report::Series{fmt::format("naive, batch {}", batch), {}, report::Mark::dot},
                    report::Series{fmt::format("naive, batch {}: wanted, not there", batch),
                                   {},
                                   report::Mark::ring,
                                   false}})
            .first->second;
    lens.insert(len);
    const auto add = [&](report::Series& series, const Json& from) {
      const double mib = from.at("extra_bytes").get<double>() / kBytesOfMiB;
      series.points.emplace_back(len, mib);
      series.about.push_back(fmt::format("{}, {} keys: {} MiB", series.name, len, short_text(mib)));
      return mib > 0;
    };
    attention_takes_some = add(attention, *row) || attention_takes_some;
    if (row->contains("naive")) {
      const Json& from = row->at("naive");
      add(failure_of(from).starts_with("out of memory") ? wanted : naive, from);
    }
  }
  report::Plot plot{.title = "Memory of naive attention and of flash attention",
                    .x_name = "queries and keys of a request",
                    .y_name = "MiB",
                    .x_log = true,
                    .y_log = true,
                    .x_ticks = {lens.begin(), lens.end()}};
  for (auto& [batch, series] : of_batch) {
    for (report::Series& one : series) {
      if (!one.points.empty()) {
        plot.series.push_back(std::move(one));
      }
    }
  }
  return fmt::format(
      "<h2>Memory of naive against flash</h2>\n<p>Beside inputs and output. The naive way's scores "
      "grow with the square of the length; {}.</p>\n{}",
      attention_takes_some ? "attention takes its workspace, whatever the length"
                           : "attention takes none, and so is not on the logarithmic axis",
      report::svg(plot));
}

// ---- the table

using CellText = std::function<std::string(const Json& row)>;

/// What is in a kind's table, from left to right.
class TableColumns {
 public:
  explicit TableColumns(const KindRows& rows);

  std::size_t count() const { return columns_.size(); }
  const report::Column& column(std::size_t i) const { return columns_[i]; }
  std::string text(std::size_t i, const Json& row) const { return texts_[i](row); }

 private:
  void add_text(std::string name, CellText text) { add(std::move(name), std::move(text), false); }
  void add(std::string name, CellText text, bool numbers = true) {
    columns_.push_back({std::move(name), numbers});
    texts_.push_back(std::move(text));
  }
  void add_us(std::string name, const char* field) {
    add(std::move(name), [field](const Json& row) { return text_of(number(row, field), 1); });
  }
  void add_other(const std::string& name, const std::function<Json(const Json& row)>& other);

  std::vector<report::Column> columns_;
  std::vector<CellText> texts_;
};

/// The same step another way, or by a peer.
void TableColumns::add_other(const std::string& name,
                             const std::function<Json(const Json& row)>& other) {
  add(name + " µs",
      [other](const Json& row) { return text_of(number(other(row), "median_us"), 1); });
  add("ratio", [other](const Json& row) {
    return short_text(number(other(row), "median_us") / number(row, "median_us"));
  });
}

/// All that failed.
std::string failures(const KindRows& rows) {
  std::string html;
  const auto add = [&](const Json& row, const std::string& whose, const Json& json) {
    if (!failure_of(json).empty()) {
      html += fmt::format("<p>{}, {}: {}</p>\n", report::escaped(label(row)),
                          report::escaped(whose), report::escaped(failure_of(json)));
    }
  };
  const auto [other, other_name] = other_way(rows.kind);
  for (const Json* row : rows.rows) {
    add(*row, "foveal", *row);
    add(*row, other_name, row->value(other, Json::object()));
    const Json peers = row->value("peers", Json::object());
    for (const auto& peer : peers.items()) {
      add(*row, peer.key(), peer.value());
    }
  }
  return html;
}

TableColumns::TableColumns(const KindRows& rows) {
  const std::string kind = rows.kind;
  const auto [other, other_name] = other_way(kind);
  add_text("shape", lengths_text);
  add("heads", heads_text);
  add("size", size_text);
  add_text("mask", mask_text);
  add_text("keys in", keys_text);
  add_text("dtype", dtype_text);
  add_text("backend", [](const Json& row) { return row.at("backend").get<std::string>(); });
  add_us("median µs", "median_us");
  add_us("min", "min_us");
  add_us("p90", "p90_us");
  add(rate_name(kind), [kind](const Json& row) { return short_text(rate(row, kind)); });
  add_text("bound by", [](const Json& row) {
    return row.value("roofline", Json::object()).value("bound", "");
  });
  add("of roofline", [](const Json& row) {
    const double part = number(row.value("roofline", Json::object()), "fraction");
    return std::isfinite(part) ? fmt::format("{:.1f} %", 100.0 * part) : "";
  });
  add_us("build µs", "build_us");
  add_us("forward µs", "forward_us");
  if (!other.empty()) {
    const auto of_other = [field = other](const Json& row) {
      return row.value(field, Json::object());
    };
    add_other(other_name, of_other);
    if (kind == "naive") {
      const auto mib = [](const Json& json) {
        return text_of(number(json, "extra_bytes") / kBytesOfMiB, 1);
      };
      add("MiB", mib);
      add("naive MiB", [=](const Json& row) { return mib(of_other(row)); });
    }
  }
  for (const std::string& peer : rows.peers) {
    add_other(peer, [peer](const Json& row) {
      return row.value("peers", Json::object()).value(peer, Json::object());
    });
  }
}

/// Columns in which every cell is empty are left out.
std::string table(const KindRows& rows) {
  std::vector<report::Column> columns;
  std::vector<std::vector<std::string>> cells(rows.rows.size());
  const TableColumns all(rows);
  for (std::size_t c = 0; c < all.count(); ++c) {
    std::vector<std::string> texts;
    for (const Json* row : rows.rows) {
      texts.push_back(all.text(c, *row));
    }
    if (std::all_of(texts.begin(), texts.end(), [](const auto& text) { return text.empty(); })) {
      continue;
    }
    columns.push_back(all.column(c));
    for (std::size_t i = 0; i < texts.size(); ++i) {
      cells[i].push_back(texts[i]);
    }
  }
  return report::table(columns, cells);
}

// ---- the page

/// What a reader must know of a kind.
std::string about(const std::string& kind) {
  return kind == "prefill"   ? "Whole prompts."
         : kind == "chunked" ? "The last queries of longer requests."
         : kind == "decode"  ? "One query a request; GB/s of keys and values."
         : kind == "mixed"   ? "Decodes, and behind them chunks of prompts, in one step."
         : kind == "cascade"
             ? "Decodes that share a prefix, which is read once for all, beside the "
               "same step without that; GB/s of different keys and values."
         : kind == "mla" ? "DeepSeek's layers: prompts on decompressed keys and values, decodes "
                           "on the latent cache."
         : kind == "cache-write"
             ? "New keys and values into the paged cache; GB/s read and written."
         : kind == "naive" ? "Attention beside matrix product, softmax, matrix product."
                           : "";
}

/// Their versions.
std::string peers_text(const Json& root) {
  std::vector<std::string> versions;
  const Json peers = root.value("peers", Json::object());
  for (const auto& peer : peers.items()) {
    versions.push_back(
        report::escaped(fmt::format("{} {}", peer.key(), peer.value().get<std::string>())));
  }
  return versions.empty() ? "" : fmt::format(" Peers: {}.", fmt::join(versions, ", "));
}

std::string body_of(const Json& root) {
  const std::vector<KindRows> kinds = by_kind(root.at("rows"));
  const bool has_products = !root.at("product_tflops").is_null();
  std::string body = fmt::format(
      "<p>foveal {} on {}: {}.{}</p>\n", report::escaped(root.at("version").get<std::string>()),
      report::escaped(root.at("device").get<std::string>()),
      report::escaped(root.at("machine").get<std::string>()), peers_text(root));
  std::vector<std::pair<std::string, std::string>> figures = {
      {fmt::format("{:.1f} GB/s", root.at("read_gb_per_s").get<double>()), "read by a plain sum"}};
  if (has_products) {
    figures.emplace_back(fmt::format("{} TFLOP/s", short_text(number(root, "product_tflops"))),
                         "products: " + root.at("products").get<std::string>());
  }
  figures.emplace_back(fmt::format("{}", root.at("rows").size()), "steps timed and checked");
  body += report::figures(figures);
  for (const Json& kind : root.at("left_out")) {
    body += fmt::format("<p>Left out: {}.</p>\n", report::escaped(kind.get<std::string>()));
  }
  body += "<h2>Under the roofline</h2>\n";
  if (has_products) {
    body +=
        "<p>No step can be faster than its products at the machine's rate, nor than moving "
        "once what it must at the machine's bandwidth. Both were measured in the same run; "
        "what stays in a cache from call to call can be read faster.</p>\n";
    body += roofline_plot(root, kinds);
    body += "<h2>Fraction of the roofline</h2>\n" + fractions(kinds);
  } else {
    body += fmt::format("<p>The rate of products was not measured: {}.</p>\n",
                        report::escaped(root.at("products").get<std::string>()));
  }
  for (const KindRows& rows : kinds) {
    body += fmt::format("<h2>{}</h2>\n<p>{}</p>\n", report::escaped(rows.kind), about(rows.kind));
    body += throughput(rows) + table(rows) + failures(rows);
    if (rows.kind == "naive") {
      body += memory(rows);
    }
  }
  return body;
}

}  // namespace

std::string to_html(std::string_view json) {
  try {
    const Json root = Json::parse(json);
    return report::page(fmt::format("Attention on {}", root.at("machine").get<std::string>()),
                        body_of(root));
  } catch (const Json::exception& error) {
    fail(ErrorCode::invalid_argument, "not what 'foveal bench --json' writes: {}", error.what());
  }
}

}  // namespace foveal::bench
