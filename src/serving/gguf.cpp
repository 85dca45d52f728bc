#include "serving/gguf.h"

#include <algorithm>
#include <array>
#include <limits>

#include "serving/byte_reader.h"

namespace foveal::serving {
namespace {

enum ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint32_t kMaxDims = 4;
/// The format's own limit for keys; kept for tensor names too, so that messages stay short.
constexpr std::uint64_t kMaxNameLength = 65535;

std::string_view read_string(ByteReader& reader, std::string_view field) {
  const auto length = reader.read<std::uint64_t>(field);
  return reader.take_string(length, field);
}

std::string read_name(ByteReader& reader, std::string_view field) {
  const std::string_view text = read_string(reader, field);
  if (text.size() > kMaxNameLength) {
    fail(ErrorCode::io, "{}: {} is {} bytes long, must be at most {}", reader.file_name(), field,
         text.size(), kMaxNameLength);
  }
  return std::string(text);
}

std::int64_t read_integer(ByteReader& reader, std::uint32_t type, std::string_view field) {
  switch (type) {
    case kUint8:
      return reader.read<std::uint8_t>(field);
    case kInt8:
      return reader.read<std::int8_t>(field);
    case kUint16:
      return reader.read<std::uint16_t>(field);
    case kInt16:
      return reader.read<std::int16_t>(field);
    case kUint32:
      return reader.read<std::uint32_t>(field);
    case kInt32:
      return reader.read<std::int32_t>(field);
    case kInt64:
      return reader.read<std::int64_t>(field);
    case kBool:
      return reader.read<std::uint8_t>(field) != 0 ? 1 : 0;
    default:
      break;
  }
  const auto value = reader.read<std::uint64_t>(field);
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    fail(ErrorCode::io, "{}: {} is {}, must be below 2^63", reader.file_name(), field, value);
  }
  return static_cast<std::int64_t>(value);
}

double read_float(ByteReader& reader, std::uint32_t type, std::string_view field) {
  return type == kFloat32 ? static_cast<double>(reader.read<float>(field))
                          : reader.read<double>(field);
}

GgufValue read_array(ByteReader& reader, std::string_view field) {
  const auto type = reader.read<std::uint32_t>(field);
  const auto count = reader.read<std::uint64_t>(field);
  // The fewest bytes an element takes, so that a count the file cannot hold allocates nothing.
  static constexpr std::array<std::uint64_t, 13> kBytes{1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8};
  if (type >= kBytes.size() || type == kArray) {
    fail(ErrorCode::io,
         "{}: {} is an array of type {}, must be of a scalar type (0 to 8, 10 to 12)",
         reader.file_name(), field, type);
  }
  if (count > reader.remaining() / kBytes[type]) {
    fail(ErrorCode::io, "{}: {} has {} array elements, but only {} bytes follow",
         reader.file_name(), field, count, reader.remaining());
  }
  const auto fill = [&](auto values, auto read_one) -> GgufValue {
    values.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      values.push_back(read_one());
    }
    return values;
  };
  if (type == kString) {
    return fill(std::vector<std::string_view>(), [&] { return read_string(reader, field); });
  }
  if (type == kFloat32 || type == kFloat64) {
    return fill(std::vector<double>(), [&] { return read_float(reader, type, field); });
  }
  return fill(std::vector<std::int64_t>(), [&] { return read_integer(reader, type, field); });
}

GgufValue read_value(ByteReader& reader, std::string_view field) {
  const auto type = reader.read<std::uint32_t>(field);
  switch (type) {
    case kFloat32:
    case kFloat64:
      return read_float(reader, type, field);
    case kBool:
      return reader.read<std::uint8_t>(field) != 0;
    case kString:
      return read_string(reader, field);
    case kArray:
      return read_array(reader, field);
    default:
      if (type > kFloat64) {
        fail(ErrorCode::io, "{}: {} has value type {}, must be from 0 to 12", reader.file_name(),
             field, type);
      }
      return read_integer(reader, type, field);
  }
}

GgufFile::TensorInfo read_tensor_info(ByteReader& reader, const std::string& name) {
  GgufFile::TensorInfo info;
  const auto dims = reader.read<std::uint32_t>(name);
  if (dims < 1 || dims > kMaxDims) {
    fail(ErrorCode::io, "{}: tensor {} has {} dimensions, must have 1 to {}", reader.file_name(),
         name, dims, kMaxDims);
  }
  std::int64_t elements = 1;
  for (std::uint32_t d = 0; d < dims; ++d) {
    const auto size = reader.read<std::int64_t>(name);
    if (size < 1 || __builtin_mul_overflow(elements, size, &elements)) {
      fail(ErrorCode::io,
           "{}: tensor {} has size {} in dimension {}, must be positive and its elements "
           "countable",
           reader.file_name(), name, size, d);
    }
    info.shape.push_back(size);
  }
  std::reverse(info.shape.begin(), info.shape.end());
  info.type = reader.read<std::uint32_t>(name);
  info.offset = reader.read<std::uint64_t>(name);
  return info;
}

std::optional<Encoding> encoding_of(std::uint32_t type) {
  switch (type) {
    case 0:
      return Encoding::f32;
    case 1:
      return Encoding::f16;
    case 2:
      return Encoding::q4_0;
    case 3:
      return Encoding::q4_1;
    case 8:
      return Encoding::q8_0;
    case 30:
      return Encoding::bf16;
    default:
      return std::nullopt;
  }
}

/// ggml's name of a tensor type that Foveal does not decode, for the message.
std::string type_name(std::uint32_t type) {
  static constexpr std::array<std::string_view, 36> kNames{
      "F32",     "F16",   "Q4_0",   "Q4_1",  "type 4",  "type 5",  "Q5_0",    "Q5_1",    "Q8_0",
      "Q8_1",    "Q2_K",  "Q3_K",   "Q4_K",  "Q5_K",    "Q6_K",    "Q8_K",    "IQ2_XXS", "IQ2_XS",
      "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S",   "IQ4_XS",  "I8",      "I16",     "I32",
      "I64",     "F64",   "IQ1_M",  "BF16",  "type 31", "type 32", "type 33", "TQ1_0",   "TQ2_0"};
  return type < kNames.size() ? std::string(kNames[type]) : fmt::format("type {}", type);
}

}  // namespace

bool is_gguf(std::span<const std::byte> bytes) {
  return bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0;
}

GgufFile::GgufFile(const std::filesystem::path& path) : file_(path) {
  ByteReader reader(file_.name(), file_.bytes());
  if (reader.take_string(4, "magic") != "GGUF") {
    fail(ErrorCode::io, "{}: magic is not \"GGUF\"", name());
  }
  const auto version = reader.read<std::uint32_t>("version");
  if (version != 2 && version != 3) {
    const bool big_endian = version != 0 && (version & 0xFFFFU) == 0;
    fail(ErrorCode::unsupported, "{}: GGUF version is {}{}, must be 2 or 3 (little-endian)", name(),
         version, big_endian ? " (a big-endian file)" : "");
  }
  const auto tensor_count = reader.read<std::uint64_t>("tensor_count");
  const auto metadata_count = reader.read<std::uint64_t>("metadata_kv_count");
  for (std::uint64_t i = 0; i < metadata_count; ++i) {
    std::string key = read_name(reader, "a metadata key");
    GgufValue value = read_value(reader, key);
    if (!metadata_.emplace(key, std::move(value)).second) {
      fail(ErrorCode::io, "{}: metadata key {} occurs twice", name(), key);
    }
  }
  for (std::uint64_t i = 0; i < tensor_count; ++i) {
    std::string tensor_name = read_name(reader, "a tensor name");
    TensorInfo info = read_tensor_info(reader, tensor_name);
    if (!tensors_.emplace(tensor_name, std::move(info)).second) {
      fail(ErrorCode::io, "{}: tensor {} occurs twice", name(), tensor_name);
    }
  }

  std::uint64_t alignment = kDefaultAlignment;
  if (const auto given = integer("general.alignment")) {
    alignment = static_cast<std::uint64_t>(*given);
    if (*given < 8 || *given > (1 << 20) || *given % 8 != 0) {
      fail(ErrorCode::io, "{}: general.alignment is {}, must be a multiple of 8 up to 2^20", name(),
           *given);
    }
  }
  const std::uint64_t start = (reader.offset() + alignment - 1) / alignment * alignment;
  // A file with only a vocabulary may end before the padding.
  data_ = file_.bytes().subspan(std::min<std::uint64_t>(start, file_.bytes().size()));
  for (const auto& [tensor_name, info] : tensors_) {
    if (info.offset % alignment != 0) {
      fail(ErrorCode::io, "{}: tensor {} has offset {}, must be a multiple of {}", name(),
           tensor_name, info.offset, alignment);
    }
  }
}

StoredTensor GgufFile::find(const std::string& tensor_name,
                            const std::vector<std::int64_t>& shape) const {
  const auto found = tensors_.find(tensor_name);
  if (found == tensors_.end()) {
    fail(ErrorCode::io, "{}: tensor {} is missing", name(), tensor_name);
  }
  const TensorInfo& info = found->second;
  if (info.shape != shape) {
    fail(ErrorCode::io, "{}: tensor {} has shape [{}], must be [{}]", name(), tensor_name,
         fmt::join(info.shape, ", "), fmt::join(shape, ", "));
  }
  const auto encoding = encoding_of(info.type);
  if (!encoding) {
    fail(ErrorCode::unsupported,
         "{}: tensor {} has type {}, must be F32, F16, BF16, Q8_0, Q4_0 or Q4_1", name(),
         tensor_name, type_name(info.type));
  }
  const EncodingInfo coding = info_of(*encoding);
  if (shape.back() % coding.block_elements != 0) {
    fail(ErrorCode::io, "{}: tensor {} has rows of {} elements, must be whole {} blocks of {}",
         name(), tensor_name, shape.back(), coding.name, coding.block_elements);
  }
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= size;  // read_tensor_info checked the product
  }
  const auto blocks = static_cast<std::uint64_t>(elements / coding.block_elements);
  const auto block_bytes = static_cast<std::uint64_t>(coding.block_bytes);
  if (info.offset > data_.size() || blocks > (data_.size() - info.offset) / block_bytes) {
    fail(ErrorCode::io,
         "{}: tensor {} ({} elements of {}, data offset {}) does not lie in the file, "
         "whose data section has {} bytes",
         name(), tensor_name, elements, coding.name, info.offset, data_.size());
  }
  return {*encoding, data_.data() + info.offset, elements};
}

template <typename T>
const T* GgufFile::get(const std::string& key, std::string_view type) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) {
    return nullptr;
  }
  const T* value = std::get_if<T>(&found->second);
  if (value == nullptr) {
    fail(ErrorCode::io, "{}: {} is of another type, must be {}", name(), key, type);
  }
  return value;
}

std::optional<std::int64_t> GgufFile::integer(const std::string& key) const {
  const auto* value = get<std::int64_t>(key, "an integer");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const auto* value = get<double>(key, "a float");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<bool> GgufFile::boolean(const std::string& key) const {
  const auto* value = get<bool>(key, "a boolean");
  return value != nullptr ? std::optional(*value) : std::nullopt;
}

std::optional<std::string> GgufFile::string(const std::string& key) const {
  const auto* value = get<std::string_view>(key, "a string");
  return value != nullptr ? std::optional(std::string(*value)) : std::nullopt;
}

const std::vector<std::string_view>* GgufFile::strings(const std::string& key) const {
  return get<std::vector<std::string_view>>(key, "an array of strings");
}

const std::vector<std::int64_t>* GgufFile::integers(const std::string& key) const {
  return get<std::vector<std::int64_t>>(key, "an array of integers");
}

}  // namespace foveal::serving
