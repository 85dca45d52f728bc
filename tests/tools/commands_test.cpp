#include "foveal/commands.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/expect_error.h"

namespace foveal::tools {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;

class WriteFile : public ::testing::Test {
 protected:
  WriteFile() {
    std::string folder = (fs::temp_directory_path() / "foveal-test-XXXXXX").string();
    folder_ = mkdtemp(folder.data());
  }
  ~WriteFile() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void make(const std::string& name) const { std::ofstream(path(name)) << "old"; }
  std::size_t count_files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

 private:
  fs::path folder_;
};

TEST_F(WriteFile, ReplacesAFileAndLeavesNothingBeside) {
  make("a");
  make("a.partial");
  fs::permissions(path("a"), fs::perms{0640});
  write_file("--json", path("a"), "new");
  EXPECT_EQ(text_of(path("a")), "new\n");
  EXPECT_EQ(fs::status(path("a")).permissions(), fs::perms{0640});
  EXPECT_EQ(text_of(path("a.partial")), "old");
  write_file("--json", path("b"), "new");
  EXPECT_EQ(fs::status(path("b")).permissions(), fs::perms{0644});
  EXPECT_EQ(count_files(), 3U);
}

TEST_F(WriteFile, WritesWhatALinkPointsTo) {
  make("target");
  fs::create_symlink(path("target"), path("link"));
  write_file("--json", path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(text_of(path("target")), "new\n");
}

TEST_F(WriteFile, WritesIntoAPipe) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  const int reader = open(path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  write_file("--json", path("pipe"), "new");
  std::array<char, 16> got{};
  EXPECT_EQ(read(reader, got.data(), got.size()), 4);
  close(reader);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

TEST_F(WriteFile, SaysBeforehandThatItCannot) {
  for (const std::string& name : {path("missing/a"), path(""), std::string()}) {
    expect_error(
        ErrorCode::io, [&] { require_writable("--json", name); }, "--json", "not be written");
    expect_error(
        ErrorCode::io, [&] { write_file("--json", name, "new"); }, "--json", "not be written");
  }
  require_writable("--json", path("a"));
  EXPECT_EQ(count_files(), 0U);
}

TEST_F(WriteFile, IsNotAskedToWriteWhatIsReadOrWrittenElse) {
  make("a");
  fs::create_symlink(path("a"), path("link"));
  expect_error(
      ErrorCode::invalid_argument,
      [&] { require_different_files("--json", path("link"), "the trace", path("a")); }, "--json",
      "the trace");
  require_different_files("--json", path("b"), "the trace", path("a"));
  require_different_files("--json", "", "the trace", "");
}

class BenchCommand : public WriteFile {
 protected:
  int foveal(std::vector<std::string> words) const {
    words.insert(words.begin(), "foveal");
    std::vector<char*> argv;
    for (std::string& word : words) {
      argv.push_back(word.data());
    }
    return run_cli(static_cast<int>(argv.size()), argv.data());
  }
};

TEST_F(BenchCommand, WritesRowsAndTheirPageNowOrLater) {
  ASSERT_EQ(foveal({"bench", "decode", "--batch", "1", "--seq-len", "32", "--threads", "1",
                    "--json", path("rows"), "--html", path("page")}),
            0);
  EXPECT_NE(text_of(path("page")).find("1 × 1 of 32"), std::string::npos);
  ASSERT_EQ(foveal({"bench", "--from", path("rows"), "--html", path("later")}), 0);
  EXPECT_EQ(text_of(path("later")), text_of(path("page")));
}

TEST_F(BenchCommand, RefusesWhatDoesNotGoTogether) {
  make("rows");
  ::testing::internal::CaptureStderr();
  EXPECT_NE(foveal({"bench", "--from", path("rows")}), 0);
  EXPECT_NE(foveal({"bench", "--from", path("rows"), "--html", path("a"), "--batch", "1"}), 0);
  EXPECT_NE(foveal({"bench", "decode", "--from", path("rows"), "--html", path("a")}), 0);
  EXPECT_NE(foveal({"bench", "--from", path("rows"), "--html", path("rows")}), 0);
  EXPECT_NE(foveal({"bench", "--from", path("missing"), "--html", path("a")}), 0);
  EXPECT_NE(foveal({"bench", "--json", path("a"), "--html", path("a")}), 0);
  ::testing::internal::GetCapturedStderr();
  ::testing::internal::CaptureStderr();
  EXPECT_NE(foveal({"bench", "--from", path("rows"), "--html", path("a")}), 0);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("--from"), std::string::npos) << said;
  EXPECT_NE(said.find("foveal bench --json"), std::string::npos) << said;
  EXPECT_EQ(text_of(path("rows")), "old");
  EXPECT_EQ(count_files(), 1U);
}

}  // namespace
}  // namespace foveal::tools
