// The page of `foveal bench --html`: as text, and in a real browser.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "support/browser.h"
#include "support/expect_error.h"

namespace foveal::bench {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Rows of every kind, as a run on a machine would give them: the default shapes with made-up
/// times, a row that failed, a naive way that had no memory, and peers.
nlohmann::ordered_json made_up_rows(DeviceType device) {
  Report report{.device = {device, 0}, .machine = "A <machine> & more", .ceilings = {}};
  report.ceilings.read_gb_per_s = 10;
  report.ceilings.products = ProductRate{.tflops = 0.2, .how = "made up"};
  report.left_out = {"mla: made up"};
  for (const Shape& shape : make_shapes({.device = device})) {
    Row row{.shape = shape, .backend = "MADE_UP"};
    const double us = std::max(shape.flops() / 1e5, shape.least_bytes() / 8e3);
    row.attention.times = {.median_us = us, .min_us = 0.9 * us, .p90_us = 1.2 * us, .count = 9};
    row.attention.extra_bytes = 1 << 20;
    if (shape.kind == Kind::naive || shape.kind == Kind::cascade) {
      row.other = row.attention;
      row.other->times.median_us *= 1.5;
    }
    if (shape.kind == Kind::naive) {
      row.other->extra_bytes =
          shape.batch * shape.num_heads * shape.q_len * shape.kv_len * size_of(shape.dtype);
      if (row.other->extra_bytes > std::int64_t{1} << 28) {
        row.other->times = {};
        row.other->failure = "out of memory: 9.9 GiB wanted, the machine has 0.5";
      }
    }
    if (shape.kind == Kind::chunked) {
      row.attention = {.failure = "out of memory: made up"};
    }
    report.rows.push_back(row);
  }
  auto json = nlohmann::ordered_json::parse(to_json(report));
  json["peers"] = {{"torch", "1.2"}, {"onnxruntime", "3.4"}};
  for (auto& row : json["rows"]) {
    if (row["kind"] == "prefill" || row["kind"] == "decode") {
      row["peers"]["torch"] = {{"median_us", 2.0 * row["median_us"].get<double>()}};
      row["peers"]["onnxruntime"] = {{"failure", "a reason that is longer than a bar's end"}};
    }
  }
  return json;
}

TEST(BenchPage, LoadsNothingAndHasOnlyNumbers) {
  const std::string html = to_html(made_up_rows(DeviceType::cuda).dump());
  EXPECT_THAT(html, ::testing::StartsWith("<!DOCTYPE html>"));
  for (const char* wrong : {"http", "src=", "@import", "url(", "nan", "inf\"", "<machine>"}) {
    EXPECT_THAT(html, Not(HasSubstr(wrong)));
  }
  for (const char* there :
       {"Fraction of the roofline", "Memory of naive", "wanted, not there", "9.9 GiB wanted",
        "out of memory: made up", "torch 1.2", "mla: made up", "longer than a bar's end"}) {
    EXPECT_THAT(html, HasSubstr(there));
  }
}

TEST(BenchPage, SaysWhyThereIsNoRoofline) {
  auto json = made_up_rows(DeviceType::cuda);
  json["product_tflops"] = nullptr;
  json["products"] = "no library";
  for (auto& row : json["rows"]) {
    row.erase("roofline");
  }
  const std::string html = to_html(json.dump());
  EXPECT_THAT(html, HasSubstr("not measured: no library"));
  EXPECT_THAT(html, Not(HasSubstr("Fraction of the roofline")));
}

TEST(BenchPage, RefusesOtherFilesNamingWhatIsMissing) {
  const auto expect_refused = [](const std::string& json, const char* what) {
    testing::expect_error(
        ErrorCode::invalid_argument, [&] { to_html(json); }, "foveal bench --json", what);
  };
  expect_refused("", "parse error");
  expect_refused("[]", "");
  expect_refused("{}", "rows");
  auto json = made_up_rows(DeviceType::cpu);
  json["rows"][3].erase("kv_len");
  expect_refused(json.dump(), "kv_len");
  json = made_up_rows(DeviceType::cpu);
  json["rows"][3]["batch"] = "many";
  expect_refused(json.dump(), "number");
}

TEST(BenchPage, IsReadableInABrowserWithEveryRow) {
  if (!testing::has_browser()) {
    GTEST_SKIP() << "chromium is not installed";
  }
  for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
    const auto json = made_up_rows(device);
    const testing::Rendered page = testing::expect_readable(to_html(json.dump()));
    ASSERT_EQ(page.table_rows.size(), json["rows"].size());
    for (std::size_t i = 0; i < page.table_rows.size(); ++i) {
      const auto& row = json["rows"][i];
      const auto text = page.table_rows[i].get<std::string>();
      EXPECT_THAT(text, HasSubstr("MADE_UP"));
      EXPECT_THAT(text, HasSubstr(std::to_string(row["kv_len"].get<int>())));
      if (row.contains("median_us")) {
        EXPECT_THAT(text, HasSubstr(fmt::format("{:.1f}", row["median_us"].get<double>())));
      }
    }
    // Roofline, fractions, memory, and one for each of eight kinds.
    EXPECT_EQ(page.plots, 3 + 8);
    EXPECT_GT(page.bars_and_marks, static_cast<std::int64_t>(2 * json["rows"].size()));
  }
}

}  // namespace
}  // namespace foveal::bench
