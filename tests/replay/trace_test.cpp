#include "replay/trace.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/expect_error.h"

namespace foveal::replay {
namespace {

using foveal::testing::expect_error;

const std::string kAzure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";

std::string mooncake(std::string_view timestamp, std::string_view input, std::string_view output,
                     std::string_view hash_ids) {
  return R"({"timestamp": )" + std::string(timestamp) + R"(, "input_length": )" +
         std::string(input) + R"(, "output_length": )" + std::string(output) + R"(, "hash_ids": )" +
         std::string(hash_ids) + "}\n";
}

TEST(ParseTrace, AzureWithCarriageReturnsAndNoEndOfTheLastLine) {
  const Trace trace = parse_trace(kAzure +
                                  "2023-11-16 23:59:59.9799600,4808,10\r\n"
                                  "2023-11-17 00:00:01.0299600,3,8");
  EXPECT_EQ(trace.format, TraceFormat::azure);
  ASSERT_EQ(trace.requests.size(), 2);
  EXPECT_EQ(trace.requests[0].line, 2);
  EXPECT_EQ(trace.requests[0].arrival_s, 0.0);
  EXPECT_EQ(trace.requests[0].input_length, 4808);
  EXPECT_EQ(trace.requests[0].output_length, 10);
  EXPECT_TRUE(trace.requests[0].hash_ids.empty());
  EXPECT_EQ(trace.requests[1].line, 3);
  EXPECT_NEAR(trace.requests[1].arrival_s, 1.05, 1e-9);
  EXPECT_EQ(trace.requests[1].total_length(), 11);
}

TEST(ParseTrace, AzureTimestampsWithOffsets) {
  const Trace trace = parse_trace(
      "\xEF\xBB\xBFTIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2024-05-10 00:00:00+00:00,1,1\n"
      "2024-05-10 01:00:01.5+01:00,2,1\n"
      "2024-05-09 23:00:02-01:00,3,1\n"
      "2024-05-10 00:00:03Z,4,1\n\n");
  ASSERT_EQ(trace.requests.size(), 4);
  EXPECT_EQ(trace.requests[1].arrival_s, 1.5);
  EXPECT_EQ(trace.requests[2].arrival_s, 2.0);
  EXPECT_EQ(trace.requests[3].arrival_s, 3.0);
}

TEST(ParseTrace, Mooncake) {
  const Trace trace = parse_trace(mooncake("27000", "1025", "52", "[0, 7, 182789]") +
                                  mooncake("27500.5", "512", "1", "[18446744073709551615]"));
  EXPECT_EQ(trace.format, TraceFormat::mooncake);
  ASSERT_EQ(trace.requests.size(), 2);
  EXPECT_EQ(trace.requests[0].line, 1);
  EXPECT_EQ(trace.requests[0].input_length, 1025);
  EXPECT_EQ(trace.requests[0].output_length, 52);
  EXPECT_EQ(trace.requests[0].hash_ids, (std::vector<std::uint64_t>{0, 7, 182789}));
  EXPECT_NEAR(trace.requests[1].arrival_s, 0.5005, 1e-9);
  EXPECT_EQ(trace.requests[1].hash_ids[0], 18446744073709551615U);
}

TEST(ParseTrace, RequestsStandInOrderOfArrival) {
  const Trace trace =
      parse_trace(mooncake("30", "1", "1", "[1]") + mooncake("10", "2", "1", "[2]") +
                  mooncake("30", "3", "1", "[3]") + mooncake("10", "4", "1", "[4]"));
  std::vector<std::int64_t> lines;
  for (const TraceRequest& request : trace.requests) {
    lines.push_back(request.line);
  }
  EXPECT_EQ(lines, (std::vector<std::int64_t>{2, 4, 1, 3}));
}

TEST(ParseTrace, NamesTheMalformedLine) {
  const std::string good = "2023-11-16 18:17:03.9799600,4808,10\n";
  const auto azure = [&](const std::string& line, const std::string& what) {
    SCOPED_TRACE(line);
    expect_error(
        ErrorCode::io, [&] { parse_trace(kAzure + good + line + "\n" + good, "a.csv"); },
        "a.csv: line 3: ", what);
  };
  azure("2023-11-16 18:17:03.9799600,4808", "three fields");
  azure("2023-11-16 18:17:03.9799600,4808,10,1", "three fields");
  azure("", "three fields");
  azure("2023-11-16 18:17:03,-1,10", "ContextTokens is \"-1\"");
  azure("2023-11-16 18:17:03,0,10", "ContextTokens is 0");
  azure("2023-11-16 18:17:03, 8,10", "ContextTokens is \" 8\"");
  azure("2023-11-16 18:17:03,8,1e3", "GeneratedTokens is \"1e3\"");
  azure("2023-11-16 18:17:03,8,", "GeneratedTokens is \"\"");
  azure("2023-11-16 18:17:03,8,0", "GeneratedTokens is 0");
  azure("2023-11-16 18:17:03,99999999999999999999,10", "ContextTokens");
  azure("2023-11-16 18:17:03,2147483647,1", "2147483648 tokens");
  for (const char* time : {"", "now", "2023-02-29 18:17:03", "2023-11-16T18:17:03",
                           "2023-11-16 24:17:03", "2023-11-16 18:17", "2023-11-16 18:17:03.",
                           "2023-11-16 18:17:03.9x", "2023-11-16 18:17:03+1", "2023-13-16 18:17:03",
                           "2023-11-16 18:17:03.99999999999999999999"}) {
    azure(std::string(time) + ",8,10", "TIMESTAMP is ");
  }

  const auto json = [&](const std::string& line, const std::string& what) {
    SCOPED_TRACE(line);
    expect_error(
        ErrorCode::io, [&] { parse_trace(mooncake("1", "2", "3", "[4]") + line, "m.jsonl"); },
        "m.jsonl: line 2", what);
  };
  json("{\"timestamp\": 1,", "is not JSON");
  json("[1]", "not a JSON object");
  json("\n" + mooncake("1", "2", "3", "[4]"), "is not JSON");
  json(std::string(100000, '['), "nests deeper");
  json(R"({"timestamp": 1, "output_length": 1, "hash_ids": [1]})", "input_length is missing");
  json(mooncake("-1", "2", "3", "[4]"), "timestamp is -1");
  json(mooncake("\"1\"", "2", "3", "[4]"), "timestamp is \"1\"");
  json(mooncake("1e300", "2", "3", "[4]"), "timestamp is 1e+300");
  json(mooncake("1", "0", "3", "[]"), "input_length is 0");
  json(mooncake("1", "-2", "3", "[4]"), "input_length is -2");
  json(mooncake("1", "2.5", "3", "[4]"), "input_length is 2.5");
  json(mooncake("1", "2", "18446744073709551615", "[4]"), "output_length is 18446744073709551615");
  json(mooncake("1", "513", "3", "[4]"), "list of 2 ids");
  json(mooncake("1", "512", "3", "[4, 5]"), "list of 1 ids");
  json(mooncake("1", "2", "3", "4"), "hash_ids is 4");
  json(mooncake("1", "2", "3", "[-4]"), "hash_ids holds -4");
  json(mooncake("1", "2", "3", "[null]"), "hash_ids holds null");
}

TEST(ParseTrace, NamesTheFormatsWhenItKnowsNone) {
  for (const char* text :
       {"\n", "hello", "timestamp,ContextTokens,GeneratedTokens\n", "\xFF\xFE"}) {
    expect_error(
        ErrorCode::io, [&] { parse_trace(text, "t"); }, "t: line 1: ", "Azure", "Mooncake");
  }
  expect_error(
      ErrorCode::io, [] { parse_trace("", "t"); }, "t: is empty");
  expect_error(
      ErrorCode::io, [] { parse_trace(kAzure + "\n", "t"); }, "t: holds no request");
}

/// Whatever a text is cut to or changed into, it is a trace or an error of io.
TEST(ParseTrace, AnyTextIsATraceOrAnError) {
  for (const std::string& whole : {kAzure + "2023-11-16 18:17:03.9799600+00:00,4808,10\n",
                                   mooncake("27000", "1025", "52", "[0, 7, 182789]")}) {
    for (std::size_t i = 0; i < whole.size(); ++i) {
      for (const int byte : {-1, 0, 0x2C, 0x30, 0x7B, 0xFF}) {
        std::string text = byte < 0 ? whole.substr(0, i) : whole;
        if (byte >= 0) {
          text[i] = static_cast<char>(byte);
        }
        try {
          EXPECT_FALSE(parse_trace(text).requests.empty());
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
        }
      }
    }
  }
}

TEST(ReadTrace, FormatsAreKnownByContentNotByName) {
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / "foveal_trace_test.csv";
  std::ofstream(path) << mooncake("1", "2", "3", "[4]");
  EXPECT_EQ(read_trace(path).format, TraceFormat::mooncake);
  std::filesystem::remove(path);
  expect_error(
      ErrorCode::io, [&] { read_trace(path); }, path.string(), "cannot be opened");
}

}  // namespace
}  // namespace foveal::replay
