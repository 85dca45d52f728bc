#include "report/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "report/html.h"

namespace foveal::report {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Plot, ALineGoesFromTheAxisToItsEnd) {
  const std::string line = svg({.title = "t", .series = {{"s", {{0, 0}, {10, 50}, {20, 100}}}}});
  // The plane is 64 … 844 wide and 256 … 40 high.
  EXPECT_THAT(line, HasSubstr("points=\"64.0,256.0 454.0,148.0 844.0,40.0 \""));
  for (const char* tick : {">0</text>", ">20</text>", ">100</text>"}) {
    EXPECT_THAT(line, HasSubstr(tick));
  }
}

TEST(Plot, LogarithmicAxesHaveTicksAtPowersOfTen) {
  const std::string line = svg({.title = "t",
                                .series = {{"s", {{1, 3}, {10, 30}, {100, 300}, {5, 0}, {6, -1}}}},
                                .x_log = true,
                                .y_log = true});
  EXPECT_THAT(line, HasSubstr(">1k</text>"));
  // Half a decade above its lower end, of three; the numbers that have no logarithm are left out.
  EXPECT_THAT(line, HasSubstr("points=\"64.0,221.6 454.0,149.6 844.0,77.6 \""));
}

TEST(Plot, WhateverThePointsAreEveryNumberIsFinite) {
  for (const std::vector<std::pair<double, double>>& points :
       {std::vector<std::pair<double, double>>{},
        {{0, 0}},
        {{5, 5}},
        {{5, 5}, {5, 5}},
        {{NAN, 1}, {1, INFINITY}},
        {{0, 1e300}, {1e-300, 1}},
        {{3, -7}}}) {
    for (const bool log : {false, true}) {
      const std::string line =
          svg({.title = "t", .series = {{"s", points}}, .x_log = log, .y_log = log});
      EXPECT_THAT(line, Not(HasSubstr("nan")));
      EXPECT_THAT(line, Not(HasSubstr("inf")));
      EXPECT_LT(line.size(), 20000);
    }
  }
}

TEST(Plot, TicksStandWhereTheyAreAskedFor) {
  const std::string plot =
      svg({.title = "t",
           .series = {{"s", {{512, 1}, {4096, 1}}, Mark::ring, false, {"<a>"}}},
           .x_log = true,
           .x_ticks = {512, 520, 4096}});
  EXPECT_THAT(plot, HasSubstr(">512</text>"));
  EXPECT_THAT(plot, HasSubstr(">4096</text>"));
  EXPECT_THAT(plot, Not(HasSubstr(">520</text>")));  // No room.
  EXPECT_THAT(plot, Not(HasSubstr("<polyline")));
  EXPECT_THAT(plot, HasSubstr("<circle cx=\"64.0\""));
  EXPECT_THAT(plot, HasSubstr("<circle cx=\"844.0\""));
  EXPECT_THAT(plot, HasSubstr("<title>&lt;a&gt;</title>"));
}

TEST(Plot, BarsBeginAtZeroAndEndAtTheirNumber) {
  const std::string bars =
      bars_svg({.title = "t",
                .series = {"a", "b"},
                .groups = {{.label = "one", .bars = {{50, "50"}, {NAN, "no <number>"}}},
                           {.label = "two", .bars = {{100, "100"}}}}});
  // From 64 on, 666 wide for 100.
  EXPECT_THAT(bars, HasSubstr("x=\"64.0\" y=\"31.0\" width=\"333.0\""));
  EXPECT_THAT(bars, HasSubstr("width=\"666.0\""));
  EXPECT_THAT(bars, HasSubstr("no &lt;number&gt;"));
  EXPECT_THAT(bars, Not(HasSubstr("nan")));
}

TEST(Plot, NumbersAreShort) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.25), "0.25");
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(999.9), "1k");
  EXPECT_EQ(short_number(1234567), "1.23M");
  EXPECT_EQ(short_number(-2.5e9), "-2.5G");
}

TEST(Html, NamesAreEscaped) {
  const std::string name = "<b>\"&";
  const std::string html = page(name, table({{name}}, {{name}}) + figures({{name, name}}) +
                                          svg({.title = name, .series = {{name, {}}}}));
  EXPECT_THAT(html, Not(HasSubstr("<b>\"")));
  EXPECT_THAT(html, HasSubstr("<td class=\"n\">&lt;b&gt;&quot;&amp;</td>"));
}

}  // namespace
}  // namespace foveal::report
