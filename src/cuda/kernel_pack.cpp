#include "cuda/kernel_pack.h"

#include "core/check.h"
#include "cuda/sealed_file.h"

namespace foveal::cuda {

void KernelPack::write(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, const Cubin*>>& cubins) {
  Json kernels = Json::array();
  std::vector<std::byte> images;
  for (const auto& [id, cubin] : cubins) {
    Json kernel = to_json(*cubin);
    kernel["id"] = id;
    kernel["offset"] = images.size();
    kernel["bytes"] = cubin->image.size();
    kernels.push_back(std::move(kernel));
    images.insert(images.end(), cubin->image.begin(), cubin->image.end());
  }
  write_sealed(path, kPackTag, {{"kernels", std::move(kernels)}}, images);
}

KernelPack KernelPack::read(const std::filesystem::path& path) {
  SealedFile file = read_sealed(path, kPackTag);
  KernelPack pack;
  pack.images_ = std::move(file.payload);
  try {
    for (const Json& kernel : file.head.at("kernels")) {
      Entry entry{.cubin = cubin_from_json(kernel),
                  .offset = kernel.at("offset"),
                  .bytes = kernel.at("bytes")};
      if (entry.offset > pack.images_.size() || pack.images_.size() - entry.offset < entry.bytes) {
        fail(ErrorCode::io, "{} is damaged: a kernel lies outside of it", path.string());
      }
      entry.cubin.origin = Cubin::Origin::pack;
      pack.entries_.emplace(kernel.at("id"), std::move(entry));
    }
  } catch (const Json::exception& error) {
    fail(ErrorCode::io, "{} is malformed: {}", path.string(), error.what());
  }
  return pack;
}

std::optional<Cubin> KernelPack::find(const std::string& id) const {
  const auto found = entries_.find(id);
  if (found == entries_.end()) {
    return std::nullopt;
  }
  const Entry& entry = found->second;
  Cubin cubin = entry.cubin;
  const auto begin = images_.begin() + static_cast<std::ptrdiff_t>(entry.offset);
  cubin.image.assign(begin, begin + static_cast<std::ptrdiff_t>(entry.bytes));
  return cubin;
}

}  // namespace foveal::cuda
