#include "cuda/sealed_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <system_error>

#include "core/check.h"
#include "cuda/digest.h"

namespace foveal::cuda {
namespace {

constexpr std::size_t kTagBytes = 8;
constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kPrefixBytes = kTagBytes + kDigestBytes + sizeof(std::uint32_t);
constexpr std::uint32_t kMaxHeadBytes = 64U << 20;

std::string reason(int error) { return std::generic_category().message(error); }

void append(std::vector<std::byte>& bytes, const void* data, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), begin, begin + size);
}

/// A temporary file beside the target, removed unless it is renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) {
    // Not mkstemp, whose files only their owner may read: the umask decides, as for any file.
    do {
      const std::uint64_t unique =
          (std::uint64_t{std::random_device()()} << 32) | std::uint64_t{std::random_device()()};
      name_ = (target.parent_path() / fmt::format("{}{:016x}", kTemporaryPrefix, unique)).string();
      descriptor_ = open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (descriptor_ < 0 && errno == EEXIST);
    if (descriptor_ < 0) {
      const int error = errno;
      name_.clear();
      fail(ErrorCode::io, "{} cannot be written: {}", target.string(), reason(error));
    }
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
    if (!name_.empty()) {
      unlink(name_.c_str());
    }
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write_all(std::span<const std::byte> bytes, const std::filesystem::path& target) {
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        fail(ErrorCode::io, "{} cannot be written: {}", target.string(), reason(errno));
      }
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }

  void rename_to(const std::filesystem::path& target) {
    const int closed = close(descriptor_);
    descriptor_ = -1;
    if (closed != 0 || rename(name_.c_str(), target.c_str()) != 0) {
      fail(ErrorCode::io, "{} cannot be written: {}", target.string(), reason(errno));
    }
    name_.clear();
  }

 private:
  std::string name_;
  int descriptor_ = -1;
};

}  // namespace

void write_sealed(const std::filesystem::path& path, std::string_view tag, const Json& head,
                  std::span<const std::byte> payload) {
  const std::string text = head.dump();
  const auto length = static_cast<std::uint32_t>(text.size());
  std::vector<std::byte> body;
  body.reserve(sizeof(length) + text.size() + payload.size());
  append(body, &length, sizeof(length));
  append(body, text.data(), text.size());
  append(body, payload.data(), payload.size());
  std::vector<std::byte> seal;
  append(seal, tag.data(), kTagBytes);
  append(seal, sha256(body).data(), kDigestBytes);

  TemporaryFile file(path);
  file.write_all(seal, path);
  file.write_all(body, path);
  file.rename_to(path);
}

std::optional<SealedFile> find_sealed(const std::filesystem::path& path, std::string_view tag) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    fail(ErrorCode::io, "{} cannot be read: it is a folder", path.string());
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    if (errno == ENOENT || errno == ENOTDIR) {
      return std::nullopt;
    }
    fail(ErrorCode::io, "{} cannot be read: {}", path.string(), reason(errno));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::max<std::streamoff>(file.tellg(), 0)));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) {
    fail(ErrorCode::io, "{} cannot be read: {}", path.string(), reason(errno));
  }
  if (bytes.size() < kPrefixBytes || std::memcmp(bytes.data(), tag.data(), kTagBytes) != 0) {
    fail(ErrorCode::io, "{} is damaged or of another kind: it does not begin with {}",
         path.string(), tag);
  }
  const std::span<const std::byte> body = std::span(bytes).subspan(kTagBytes + kDigestBytes);
  if (std::memcmp(sha256(body).data(), bytes.data() + kTagBytes, kDigestBytes) != 0) {
    fail(ErrorCode::io, "{} is damaged: its checksum does not match", path.string());
  }
  std::uint32_t length = 0;
  std::memcpy(&length, body.data(), sizeof(length));
  const std::span<const std::byte> rest = body.subspan(sizeof(length));
  if (length > rest.size()) {
    fail(ErrorCode::io, "{} is damaged: its head is cut short", path.string());
  }
  const auto* text = reinterpret_cast<const char*>(rest.data());
  SealedFile result{.head = Json::parse(text, text + length, nullptr, false),
                    .payload = {rest.begin() + length, rest.end()}};
  if (result.head.is_discarded()) {
    fail(ErrorCode::io, "{} is damaged: its head is no JSON", path.string());
  }
  return result;
}

SealedFile read_sealed(const std::filesystem::path& path, std::string_view tag) {
  std::optional<SealedFile> file = find_sealed(path, tag);
  if (!file) {
    fail(ErrorCode::io, "{} cannot be read: {}", path.string(), reason(ENOENT));
  }
  return std::move(*file);
}

std::optional<Json> read_sealed_head(const std::filesystem::path& path, std::string_view tag) {
  std::ifstream file(path, std::ios::binary);
  char prefix[kPrefixBytes];
  std::uint32_t length = 0;
  if (!file.read(prefix, kPrefixBytes) || std::string_view(prefix, kTagBytes) != tag) {
    return std::nullopt;
  }
  std::memcpy(&length, prefix + kTagBytes + kDigestBytes, sizeof(length));
  if (length > kMaxHeadBytes) {
    return std::nullopt;
  }
  std::string text(length, '\0');
  if (!file.read(text.data(), length)) {
    return std::nullopt;
  }
  Json head = Json::parse(text, nullptr, false);
  return head.is_object() ? std::optional(std::move(head)) : std::nullopt;
}

Json to_json(const Cubin& cubin) {
  const KernelResources& resources = cubin.resources;
  return {{"key", cubin.key_text},
          {"entry", cubin.entry},
          {"arch", cubin.arch},
          {"registers", resources.registers},
          {"stack_bytes", resources.stack_bytes},
          {"spill_store_bytes", resources.spill_store_bytes},
          {"spill_load_bytes", resources.spill_load_bytes},
          {"static_shared_bytes", resources.static_shared_bytes},
          {"parameter_bytes", resources.parameter_bytes},
          {"log", cubin.log}};
}

Cubin cubin_from_json(const Json& json) {
  try {
    Cubin cubin;
    cubin.key_text = json.at("key");
    cubin.entry = json.at("entry");
    cubin.arch = json.at("arch");
    cubin.resources = {.registers = json.at("registers"),
                       .stack_bytes = json.at("stack_bytes"),
                       .spill_store_bytes = json.at("spill_store_bytes"),
                       .spill_load_bytes = json.at("spill_load_bytes"),
                       .static_shared_bytes = json.at("static_shared_bytes"),
                       .parameter_bytes = json.at("parameter_bytes").get<std::vector<int>>()};
    cubin.log = json.at("log");
    return cubin;
  } catch (const Json::exception& error) {
    fail(ErrorCode::io, "description of a kernel is malformed: {}", error.what());
  }
}

}  // namespace foveal::cuda
