#include "serving/safetensors.h"

#include <gtest/gtest.h>

#include "serving/test_files.h"

namespace foveal::serving {
namespace {

using testing::append;
using testing::expect_error;
using testing::TempDir;

/// A file of this header (its true length in front) and data.
std::string file_of(const std::string& header, const std::string& data) {
  std::string out;
  append(out, static_cast<std::uint64_t>(header.size()));
  return out + header + data;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  SafetensorsFile load(const std::string& content) {
    return SafetensorsFile(folder_.write("t.safetensors", content));
  }
  void expect_refused(const std::vector<std::string>& parts, const std::string& header,
                      const std::string& data, ErrorCode code = ErrorCode::io) {
    expect_error(code, parts, [&] { load(file_of(header, data)); });
    expect_error(code, {"t.safetensors"}, [&] { load(file_of(header, data)); });
  }
  TempDir folder_;
};

TEST_F(SafetensorsTest, WritesAndReadsEveryDtype) {
  struct Case {
    std::string name;
    DType dtype;
    bool is_bool;
  };
  const std::vector<Case> cases{{"f64", DType::f64, false},   {"f32", DType::f32, false},
                                {"f16", DType::f16, false},   {"bf16", DType::bf16, false},
                                {"e4", DType::f8e4m3, false}, {"e5", DType::f8e5m2, false},
                                {"i32", DType::i32, false},   {"i64", DType::i64, false},
                                {"u8", DType::u8, false},     {"bool", DType::u8, true}};
  std::map<std::string, SafetensorsTensor> tensors;
  std::map<std::string, std::vector<std::byte>> contents;
  for (const Case& c : cases) {
    auto& content = contents[c.name];
    for (std::int64_t i = 0; i < 3 * size_of(c.dtype); ++i) {
      content.push_back(static_cast<std::byte>(c.name[0] + i));
    }
    tensors[c.name] = {c.dtype, c.is_bool, {3, 1}, content};
  }
  tensors["scalar"] = {DType::u8, false, {}, std::span(contents["u8"]).first(1)};
  tensors["empty"] = {DType::f32, false, {0, 7}, {}};
  const std::map<std::string, std::string> metadata{{"scale", "0.125"},
                                                    {"naïve \"key\"", "line\n"}};
  const auto path = folder_.path() / "t.safetensors";
  write_safetensors(path, tensors, metadata);

  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const Case& c : cases) {
    const SafetensorsTensor& tensor = file.tensor(c.name);
    EXPECT_EQ(tensor.dtype, c.dtype) << c.name;
    EXPECT_EQ(tensor.is_bool, c.is_bool) << c.name;
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{3, 1})) << c.name;
    EXPECT_TRUE(std::equal(tensor.data.begin(), tensor.data.end(), contents[c.name].begin(),
                           contents[c.name].end()))
        << c.name;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data.data()) %
                  static_cast<std::uintptr_t>(size_of(c.dtype)),
              0U);
  }
  EXPECT_EQ(file.tensor("scalar").view().numel(), 1);
  EXPECT_EQ(file.tensor("empty").view().numel(), 0);
  EXPECT_EQ(file.tensor("i64").view().dtype(), DType::i64);
  EXPECT_FALSE(file.has("other"));
  expect_error(ErrorCode::io, {"t.safetensors", "tensor other is missing"},
               [&] { file.tensor("other"); });
  // Nothing else is left in the folder.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 1);
}

TEST_F(SafetensorsTest, AlignsWhatTheFileDoesNot) {
  std::string data = "x";
  append(data, 1.5F);
  append(data, -2.0F);
  const auto file = load(file_of(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                 R"("f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
                                 data));
  const TensorView view = file.tensor("f").view();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data()) % alignof(float), 0U);
  EXPECT_EQ(view.as<float>()[0], 1.5F);
  EXPECT_EQ(view.as<float>()[1], -2.0F);
}

TEST_F(SafetensorsTest, WritingToATensorLeavesTheFile) {
  const std::string content =
      file_of(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x");
  const auto path = folder_.write("t.safetensors", content);
  SafetensorsFile(path).tensor("b").data[0] = std::byte{7};
  EXPECT_EQ(SafetensorsFile(path).tensor("b").data[0], std::byte{'x'});
}

TEST_F(SafetensorsTest, RefusesMalformedFiles) {
  expect_refused({"header"}, "{", "");
  expect_refused({"header"}, "[]", "");
  expect_refused({"key \"a\" twice"}, R"({"a":1,"a":2})", "");
  expect_refused({"__metadata__.k is 1"}, R"({"__metadata__":{"k":1}})", "");
  expect_refused({"__metadata__ is []"}, R"({"__metadata__":[]})", "");
  expect_refused({"tensor a has dtype missing"}, R"({"a":{}})", "");
  expect_refused({"tensor a has dtype missing"}, R"({"a":3})", "");
  expect_refused({"tensor a has dtype \"F4\"", "F8_E4M3"},
                 R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,4]}})", "",
                 ErrorCode::unsupported);
  const auto refuse = [&](const std::vector<std::string>& parts, const std::string& shape,
                          const std::string& offsets) {
    expect_refused(
        parts, R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}",
        "12345678");
  };
  refuse({"shape 3"}, "3", "[0,8]");
  refuse({"shape [-1]"}, "[-1]", "[0,8]");
  refuse({"shape [2.5]"}, "[2.5]", "[0,8]");
  refuse({"shape [18446744073709551615]"}, "[18446744073709551615]", "[0,8]");
  refuse({"shape [4611686018427387904,4]", "2^63"}, "[4611686018427387904,4]", "[0,8]");
  refuse({"data_offsets [0,4]", "8 bytes apart"}, "[2]", "[0,4]");
  refuse({"data_offsets [8,0]"}, "[2]", "[8,0]");
  refuse({"data_offsets [0]"}, "[2]", "[0]");
  refuse({"data_offsets [-8,0]"}, "[2]", "[-8,0]");
  refuse({"data_offsets [4, 12]", "must begin at 0"}, "[2]", "[4,12]");
  refuse({"data_offsets [0, 400]", "end by 8"}, "[100]", "[0,400]");
  refuse({"tensors end at 4", "at 8"}, "[1]", "[0,4]");
  expect_refused({"tensor b", "must begin at 4"},
                 R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                 "123456");

  std::string huge;
  append(huge, ~std::uint64_t{0});
  expect_error(ErrorCode::io, {"header length is 18446744073709551615"},
               [&] { load(huge + "{}"); });
  huge.clear();
  append(huge, std::uint64_t{1000});
  expect_error(ErrorCode::io, {"header needs 1000 bytes"}, [&] { load(huge + "{}"); });
  // Deep nesting must not exhaust the stack.
  expect_refused({"header"}, std::string(1000000, '['), "");
  expect_error(ErrorCode::io, {"absent"}, [&] { SafetensorsFile(folder_.path() / "absent"); });
}

TEST_F(SafetensorsTest, SurvivesDamage) {
  const auto path = folder_.path() / "t.safetensors";
  testing::expect_survives_damage(
      folder_, "t.safetensors",
      file_of(R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
              R"("b":{"dtype":"U8","shape":[1,1],"data_offsets":[8,9]}})",
              "123456789"),
      [&] { SafetensorsFile file(path); });
}

TEST_F(SafetensorsTest, RefusesToWriteNonsense) {
  std::vector<std::byte> four(4);
  const auto path = folder_.path() / "out.safetensors";
  const auto refuse = [&](ErrorCode code, const std::vector<std::string>& parts,
                          const std::filesystem::path& to, const std::string& name,
                          const SafetensorsTensor& tensor) {
    expect_error(code, parts, [&] { write_safetensors(to, {{name, tensor}}); });
    EXPECT_FALSE(std::filesystem::exists(to));
  };
  refuse(ErrorCode::invalid_argument, {"tensor a", "4 bytes", "f32[2]"}, path, "a",
         {DType::f32, false, {2}, four});
  refuse(ErrorCode::invalid_argument, {"is_bool", "f32"}, path, "a", {DType::f32, true, {1}, four});
  refuse(ErrorCode::invalid_argument, {"__metadata__"}, path, "__metadata__",
         {DType::f32, false, {1}, four});
  refuse(ErrorCode::io, {"nowhere"}, folder_.path() / "nowhere" / "out", "a",
         {DType::f32, false, {1}, four});
}

}  // namespace
}  // namespace foveal::serving
