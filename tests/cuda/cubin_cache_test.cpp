#include "cuda/cubin_cache.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "cuda/kernel_pack.h"
#include "cuda/test_support.h"
#include "support/expect_error.h"

namespace foveal::cuda {
namespace {

namespace fs = std::filesystem;
using testing::CapturedLog;
using testing::TemporaryFolder;

constexpr std::int64_t kPlenty = 1 << 30;

Cubin make_cubin(const std::string& name, std::size_t bytes) {
  Cubin cubin{.key_text = name, .entry = "entry", .arch = "sm_90a"};
  cubin.resources.registers = 168;
  cubin.resources.spill_store_bytes = 4;
  cubin.log = "ptxas info";
  cubin.image.resize(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    cubin.image[i] = static_cast<std::byte>(i * 7 + name.size());
  }
  return cubin;
}

fs::path file_of(const fs::path& folder, const std::string& id) { return folder / (id + ".cubin"); }

void set_age(const fs::path& path, std::chrono::hours age) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - age);
}

TEST(CubinCache, GivesBackWhatWasStored) {
  const TemporaryFolder folder;
  CubinCache cache(folder.path() / "deep" / "cubins", kPlenty);
  EXPECT_FALSE(cache.load("a"));
  const Cubin stored = make_cubin("key a", 5000);
  cache.store("a", stored);
  const std::optional<Cubin> loaded = cache.load("a");
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->image, stored.image);
  EXPECT_EQ(loaded->key_text, "key a");
  EXPECT_EQ(loaded->arch, "sm_90a");
  EXPECT_EQ(loaded->entry, "entry");
  EXPECT_EQ(loaded->log, "ptxas info");
  EXPECT_EQ(loaded->resources.registers, 168);
  EXPECT_EQ(loaded->resources.spill_store_bytes, 4);
  EXPECT_EQ(loaded->origin, Cubin::Origin::disk);
}

TEST(CubinCache, TakesDamagedFilesForAbsent) {
  const TemporaryFolder folder;
  CubinCache cache(folder.path(), kPlenty);
  const Cubin stored = make_cubin("key", 3000);
  cache.store("a", stored);
  const fs::path path = file_of(folder.path(), "a");
  const auto size = static_cast<std::size_t>(fs::file_size(path));
  const CapturedLog log;
  for (const std::size_t length : {std::size_t{0}, std::size_t{5}, std::size_t{39}, std::size_t{43},
                                   std::size_t{60}, size / 2, size - 1}) {
    cache.store("a", stored);
    fs::resize_file(path, length);
    EXPECT_FALSE(cache.load("a")) << "cut to " << length;
  }
  for (std::size_t at = 0; at < size; at += 1 + size / 50) {
    cache.store("a", stored);
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(static_cast<std::streamoff>(at));
      const char flipped = static_cast<char>(file.get() ^ 0x10);
      file.seekp(static_cast<std::streamoff>(at));
      file.put(flipped);
    }
    EXPECT_FALSE(cache.load("a")) << "flipped at " << at;
  }
  EXPECT_THAT(log.text(), ::testing::HasSubstr("is damaged"));
  cache.store("a", stored);
  EXPECT_TRUE(cache.load("a"));
}

TEST(CubinCache, StaysBelowItsBoundByDroppingTheLeastRecentlyUsed) {
  const TemporaryFolder folder;
  CubinCache cache(folder.path(), 55'000);
  for (int i = 0; i < 5; ++i) {
    const std::string id = std::to_string(i);
    cache.store(id, make_cubin(id, 10'000));
    set_age(file_of(folder.path(), id), std::chrono::hours(10 - i));
  }
  EXPECT_TRUE(cache.load("0"));  // Used again, so "1" is now the oldest.
  cache.store("5", make_cubin("5", 10'000));
  EXPECT_FALSE(cache.load("1"));
  for (const char* id : {"0", "2", "3", "4", "5"}) {
    EXPECT_TRUE(cache.load(id)) << id;
  }
}

TEST(CubinCache, RemovesAbandonedTemporaryFilesOnly) {
  const TemporaryFolder folder;
  CubinCache cache(folder.path(), kPlenty);
  const fs::path dead = folder.path() / ".tmp-dead";
  const fs::path live = folder.path() / ".tmp-live";
  const fs::path other = folder.path() / "notes.txt";
  for (const fs::path& path : {dead, live, other}) {
    std::ofstream(path) << "x";
  }
  set_age(dead, std::chrono::hours(2));
  cache.store("a", make_cubin("a", 10));
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(live));
  EXPECT_EQ(cache.clear(), 1);
  EXPECT_TRUE(fs::exists(other));
}

TEST(CubinCache, ListsMostRecentlyUsedFirst) {
  const TemporaryFolder folder;
  CubinCache cache(folder.path(), kPlenty);
  cache.store("old", make_cubin("old key", 100));
  cache.store("new", make_cubin("new key", 100));
  std::ofstream(folder.path() / "broken.cubin") << "nothing";
  set_age(file_of(folder.path(), "old"), std::chrono::hours(5));
  const auto entries = cache.list();
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].cubin.key_text, "new key");
  EXPECT_EQ(entries[1].cubin.key_text, "old key");
  EXPECT_NEAR(static_cast<double>(entries[1].age.count()), 5 * 3600.0, 60.0);
  EXPECT_EQ(cache.clear(), 3);
  EXPECT_TRUE(cache.list().empty());
}

TEST(CubinCache, DegradesToReadingWithOneLine) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "file";
  std::ofstream(file) << "x";
  const CapturedLog log;
  CubinCache cache(file / "cubins", kPlenty);  // Below a file no folder can be made.
  cache.store("a", make_cubin("a", 10));
  cache.store("b", make_cubin("b", 10));
  EXPECT_FALSE(cache.load("a"));
  EXPECT_EQ(log.lines(), 1U) << log.text();
  EXPECT_THAT(log.text(), ::testing::HasSubstr("in memory only"));
}

TEST(CubinCache, LeavesNothingBehindOnAFullDisk) {
  const TemporaryFolder folder;
  const CapturedLog log;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto previous = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  CubinCache cache(folder.path(), kPlenty);
  cache.store("a", make_cubin("a", 100'000));
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, previous);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_EQ(log.lines(), 1U) << log.text();
}

TEST(CubinCache, WithoutAFolderKeepsNothing) {
  const CapturedLog log;
  CubinCache cache({}, kPlenty);
  cache.store("a", make_cubin("a", 10));
  EXPECT_FALSE(cache.load("a"));
  EXPECT_EQ(log.text(), "");
}

/// Stores and loads a few ids in turn, as writers that race would; every load must be whole or
/// absent.
bool hammer(const fs::path& folder, int rounds) {
  CubinCache cache(folder, 200'000);  // Small, so that trimming races too.
  for (int round = 0; round < rounds; ++round) {
    const std::string id = std::to_string(round % 7);
    const Cubin cubin = make_cubin(id, 40'000 + 100 * static_cast<std::size_t>(round % 7));
    cache.store(id, cubin);
    const std::optional<Cubin> loaded = cache.load(std::to_string((round + 3) % 7));
    if (loaded && loaded->image != make_cubin(loaded->key_text, loaded->image.size()).image) {
      return false;
    }
  }
  return true;
}

TEST(CubinCache, ServesManyThreads) {
  const TemporaryFolder folder;
  const CapturedLog log;
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] { failures += hammer(folder.path(), 60) ? 0 : 1; });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(log.text(), "");  // Nothing was ever seen damaged.
}

TEST(CubinCache, ServesManyProcesses) {
  const TemporaryFolder folder;
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const CapturedLog log;
      const bool whole = hammer(folder.path(), 60);
      _exit(whole && log.text().empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().extension(), ".cubin") << entry.path();
  }
}

TEST(KernelPack, HoldsManyKernelsInOneFile) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "a.pack";
  const Cubin first = make_cubin("first", 1000);
  const Cubin second = make_cubin("second", 0);
  KernelPack::write(path, {{"1", &first}, {"2", &second}});
  const KernelPack pack = KernelPack::read(path);
  EXPECT_EQ(pack.size(), 2U);
  ASSERT_TRUE(pack.find("1"));
  EXPECT_EQ(pack.find("1")->image, first.image);
  EXPECT_EQ(pack.find("1")->origin, Cubin::Origin::pack);
  EXPECT_EQ(pack.find("2")->key_text, "second");
  EXPECT_FALSE(pack.find("3"));

  fs::resize_file(path, fs::file_size(path) - 1);
  foveal::testing::expect_error(
      ErrorCode::io, [&] { KernelPack::read(path); }, "a.pack", "damaged");
  foveal::testing::expect_error(
      ErrorCode::io, [&] { KernelPack::read(folder.path() / "none.pack"); }, "none.pack");
  CubinCache(folder.path(), kPlenty).store("c", first);
  foveal::testing::expect_error(
      ErrorCode::io, [&] { KernelPack::read(file_of(folder.path(), "c")); }, "of another kind");
}

}  // namespace
}  // namespace foveal::cuda
