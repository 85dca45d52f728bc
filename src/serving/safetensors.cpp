#include "serving/safetensors.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <string_view>
#include <utility>

#include "serving/byte_reader.h"
#include "serving/json.h"

namespace foveal::serving {
namespace {

/// The format's own limit.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";

struct DTypeName {
  std::string_view name;
  DType dtype;
  bool is_bool;
};
constexpr std::array<DTypeName, 10> kDTypes{{{"F64", DType::f64, false},
                                             {"F32", DType::f32, false},
                                             {"F16", DType::f16, false},
                                             {"BF16", DType::bf16, false},
                                             {"F8_E4M3", DType::f8e4m3, false},
                                             {"F8_E5M2", DType::f8e5m2, false},
                                             {"I32", DType::i32, false},
                                             {"I64", DType::i64, false},
                                             {"U8", DType::u8, false},
                                             {"BOOL", DType::u8, true}}};

std::optional<std::int64_t> as_size(const nlohmann::json& value) {
  if (!value.is_number_unsigned() ||
      value.get<std::uint64_t>() >
          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(value.get<std::uint64_t>());
}

/// Bytes of a row-major array; empty when they overflow.
std::optional<std::int64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape) {
  std::int64_t bytes = size_of(dtype);
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

/// A tensor's entry in the header, its data still to be set.
struct Entry {
  SafetensorsTensor tensor;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

Entry read_entry(const std::string& file, const std::string& name, const nlohmann::json& json) {
  const auto refuse = [&](std::string_view field, std::string_view must) {
    const nlohmann::json* value =
        json.is_object() ? find_member(json, std::string(field)) : nullptr;
    fail(ErrorCode::io, "{}: tensor {} has {} {}, must be {}", file, name, field,
         value != nullptr ? describe_json(*value) : "missing", must);
  };
  Entry entry;
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string()) {
    refuse("dtype", "a string");
  }
  const auto dtype_name = json["dtype"].get<std::string>();
  const auto* dtype = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeName& known) {
    return known.name == dtype_name;
  });
  if (dtype == kDTypes.end()) {
    fail(ErrorCode::unsupported,
         "{}: tensor {} has dtype \"{}\", must be F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I32, I64, "
         "U8 or "
         "BOOL",
         file, name, dtype_name);
  }
  entry.tensor.dtype = dtype->dtype;
  entry.tensor.is_bool = dtype->is_bool;

  if (!json.contains("shape") || !json["shape"].is_array()) {
    refuse("shape", "an array of sizes");
  }
  for (const nlohmann::json& element : json["shape"]) {
    const auto size = as_size(element);
    if (!size) {
      refuse("shape", "an array of sizes");
    }
    entry.tensor.shape.push_back(*size);
  }
  const auto bytes = bytes_of(entry.tensor.dtype, entry.tensor.shape);
  if (!bytes) {
    refuse("shape", "a number of elements below 2^63");
  }

  const std::string field = "data_offsets";
  if (!json.contains(field) || !json[field].is_array() || json[field].size() != 2) {
    refuse(field, "two offsets");
  }
  const auto begin = as_size(json[field][0]);
  const auto end = as_size(json[field][1]);
  if (!begin || !end || *begin > *end || *end - *begin != *bytes) {
    refuse(field, fmt::format("{} bytes apart, as its shape and dtype need", *bytes));
  }
  entry.begin = *begin;
  entry.end = *end;
  return entry;
}

}  // namespace

bool is_safetensors(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  if (bytes.size() < sizeof(length) + 2) {
    return false;
  }
  std::memcpy(&length, bytes.data(), sizeof(length));
  return length >= 2 && length <= kMaxHeaderBytes &&
         static_cast<char>(bytes[sizeof(length)]) == '{';
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  ByteReader reader(name(), file_.bytes());
  const auto header_bytes = reader.read<std::uint64_t>("header length");
  if (header_bytes > kMaxHeaderBytes) {
    fail(ErrorCode::io, "{}: header length is {}, must be at most {}", name(), header_bytes,
         kMaxHeaderBytes);
  }
  const nlohmann::json header =
      parse_json_object(reader.take_string(header_bytes, "header"), name() + ": header");
  const auto data = file_.bytes().subspan(reader.offset());

  std::vector<std::pair<std::string, Entry>> entries;
  for (const auto& [key, value] : header.items()) {
    if (key != kMetadata) {
      entries.emplace_back(key, read_entry(name(), key, value));
      continue;
    }
    if (!value.is_object()) {
      fail(ErrorCode::io, "{}: {} is {}, must be an object of strings", name(), key,
           describe_json(value));
    }
    for (const auto& [metadata_key, text] : value.items()) {
      if (!text.is_string()) {
        fail(ErrorCode::io, "{}: {}.{} is {}, must be a string", name(), key, metadata_key,
             describe_json(text));
      }
      metadata_[metadata_key] = text.get<std::string>();
    }
  }

  // The format wants the data covered without gaps or overlaps.
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  std::int64_t covered = 0;
  for (auto& [tensor_name, entry] : entries) {
    if (entry.begin != covered || static_cast<std::uint64_t>(entry.end) > data.size()) {
      fail(ErrorCode::io,
           "{}: tensor {} has data_offsets [{}, {}], must begin at {} and end by {}, where the "
           "file does",
           name(), tensor_name, entry.begin, entry.end, covered, data.size());
    }
    covered = entry.end;
    SafetensorsTensor& tensor = entry.tensor;
    tensor.data = data.subspan(static_cast<std::size_t>(entry.begin),
                               static_cast<std::size_t>(entry.end - entry.begin));
    const auto alignment = static_cast<std::uintptr_t>(size_of(tensor.dtype));
    if (!tensor.data.empty() &&
        reinterpret_cast<std::uintptr_t>(tensor.data.data()) % alignment != 0) {
      constexpr std::size_t kUnit = sizeof(std::max_align_t);
      auto& copy = aligned_copies_.emplace_back((tensor.data.size() + kUnit - 1) / kUnit);
      std::memcpy(copy.data(), tensor.data.data(), tensor.data.size());
      tensor.data = {reinterpret_cast<std::byte*>(copy.data()), tensor.data.size()};
    }
    tensors_.emplace(tensor_name, std::move(tensor));
  }
  if (static_cast<std::uint64_t>(covered) != data.size()) {
    fail(ErrorCode::io, "{}: tensors end at {} of the data, must end with the file, at {}", name(),
         covered, data.size());
  }
}

const SafetensorsTensor& SafetensorsFile::tensor(const std::string& tensor_name) const {
  const auto found = tensors_.find(tensor_name);
  if (found == tensors_.end()) {
    fail(ErrorCode::io, "{}: tensor {} is missing", name(), tensor_name);
  }
  return found->second;
}

void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, SafetensorsTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements first, so that every tensor is aligned.
  std::vector<const std::pair<const std::string, SafetensorsTensor>*> order;
  for (const auto& tensor : tensors) {
    order.push_back(&tensor);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return size_of(a->second.dtype) > size_of(b->second.dtype);
  });

  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) {
    header[std::string(kMetadata)] = metadata;
  }
  std::int64_t offset = 0;
  for (const auto* entry : order) {
    const std::string& tensor_name = entry->first;
    const SafetensorsTensor& tensor = entry->second;
    const auto bytes = bytes_of(tensor.dtype, tensor.shape);
    const auto size = static_cast<std::int64_t>(tensor.data.size());
    check(tensor_name != kMetadata, "tensor has the name {}, which the format reserves", kMetadata);
    check(bytes == size, "tensor {} has {} bytes of data, must have those of {}[{}]", tensor_name,
          size, to_string(tensor.dtype), fmt::join(tensor.shape, ", "));
    const auto* name = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeName& known) {
      return known.dtype == tensor.dtype && known.is_bool == tensor.is_bool;
    });
    check(name != kDTypes.end(), "tensor {} has is_bool set, so its dtype must be u8, not {}",
          tensor_name, to_string(tensor.dtype));
    header[tensor_name] = {
        {"dtype", name->name}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + size}}};
    offset += size;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const auto length = static_cast<std::uint64_t>(text.size());

  const std::string temporary = fmt::format("{}.{}.tmp", path.string(), ::getpid());
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const auto* entry : order) {
    const auto data = entry->second.data;
    out.write(reinterpret_cast<const char*>(data.data()),
              static_cast<std::streamsize>(data.size()));
  }
  out.close();
  std::error_code error;
  if (out) {
    std::filesystem::rename(temporary, path, error);
  }
  if (!out || error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail(ErrorCode::io, "{}: {} bytes cannot be written{}{}", path.string(),
         sizeof(length) + text.size() + static_cast<std::size_t>(offset), error ? ": " : "",
         error ? error.message() : "");
  }
}

}  // namespace foveal::serving
