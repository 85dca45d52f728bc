#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/jit.h"

// The file format of cached cubins and of packs: a tag of 8 bytes, the SHA-256 of all that follows,
// the length of a JSON head (u32), the head, and a payload. Whatever a crash, a full disk or a
// careless copy leaves behind is recognised.
namespace foveal::cuda {

using Json = nlohmann::ordered_json;

struct SealedFile {
  Json head;
  std::vector<std::byte> payload;
};

inline constexpr std::string_view kCubinTag = "FOVEALC1";
inline constexpr std::string_view kPackTag = "FOVEALP1";
/// How the names of files being written begin.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

/// Writes beside `path` and renames, so that readers see the old file, the new one or none. Throws
/// io with the system's reason. Not synced to disk: after a power cut the checksum decides.
void write_sealed(const std::filesystem::path& path, std::string_view tag, const Json& head,
                  std::span<const std::byte> payload);

/// Empty when there is no such file. Throws io when it cannot be read or is damaged.
std::optional<SealedFile> find_sealed(const std::filesystem::path& path, std::string_view tag);

/// The same, where a missing file is an error too.
SealedFile read_sealed(const std::filesystem::path& path, std::string_view tag);

/// The head alone, unverified, for listings. Empty when it cannot be read.
std::optional<Json> read_sealed_head(const std::filesystem::path& path, std::string_view tag);

/// A cubin's description, without the machine code.
Json to_json(const Cubin& cubin);
/// Throws io when a member is missing or of another type.
Cubin cubin_from_json(const Json& json);

}  // namespace foveal::cuda
