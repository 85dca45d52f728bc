#pragma once

// Small files for the tests of the loaders.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/error.h"

namespace foveal::serving::testing {

/// A folder of its own for a test, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = ::testing::TempDir() + "foveal_XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view content) const {
    // Some file systems flush a file that is cut to nothing and written anew, which takes its time.
    std::filesystem::remove(path_ / name);
    std::ofstream(path_ / name, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

template <typename T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// first, first + step, …
inline std::vector<float> ramp(std::size_t count, float first, float step) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = first + step * static_cast<float>(i);
  }
  return values;
}

/// Expects `call` to throw an Error of this code whose message holds each of `parts`.
template <typename Call>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected " << to_string(code) << " with "
                  << parts.front();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos)
          << "\"" << error.what() << "\" lacks \"" << part << "\"";
    }
  }
}

/// Cuts the file everywhere and changes each of its bytes in several ways. Each time `load` must
/// return or throw Error; a sanitizer sees the rest. Files cut short must not load, unless
/// `cuts_may_load`.
template <typename Load>
void expect_survives_damage(const TempDir& folder, const std::string& name,
                            const std::string& content, const Load& load,
                            bool cuts_may_load = false) {
  const auto attempt = [&](const std::string& damaged) {
    folder.write(name, damaged);
    try {
      load();
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  ASSERT_TRUE(attempt(content));
  const std::size_t stride = content.size() / 600 + 1;
  for (std::size_t length = 0; length < content.size(); length += stride) {
    EXPECT_TRUE(!attempt(content.substr(0, length)) || cuts_may_load) << "cut to " << length;
  }
  for (std::size_t at = 0; at < content.size(); at += stride) {
    for (const char flip : {'\x01', '\xFF'}) {
      std::string damaged = content;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      attempt(damaged);
    }
  }
  folder.write(name, content);
}

/// The folder of shared test data: $FOVEAL_SHARED_DIR, else ../shared beside the sources.
inline std::filesystem::path shared_dir() {
  const char* given = std::getenv("FOVEAL_SHARED_DIR");
  return given != nullptr && *given != '\0'
             ? std::filesystem::path(given)
             : std::filesystem::path(FOVEAL_SOURCE_DIR) / ".." / "shared";
}

}  // namespace foveal::serving::testing
