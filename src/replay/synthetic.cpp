#include "replay/synthetic.h"

#include <cstring>
#include <random>

#include "core/check.h"
#include "core/convert.h"

namespace foveal::replay {
namespace {

/// Places where a row may start.
constexpr std::int64_t kNumStarts = std::int64_t{1} << 20;

/// splitmix64's finaliser: every bit of the result depends on every bit of x.
std::uint64_t scrambled(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// A token of a sequence of its own: of a hash id, of a prompt, or of an answer. Two that differ
/// are the same token now and then, sixteen in a row never.
enum class Sequence : std::uint8_t { hash_id = 1, prompt, answer };

std::int32_t token_of(Sequence sequence, std::uint64_t number, std::int64_t position) {
  const std::uint64_t key = scrambled(number + (static_cast<std::uint64_t>(sequence) << 62));
  return static_cast<std::int32_t>(scrambled(key + static_cast<std::uint64_t>(position)) >> 33);
}

}  // namespace

std::vector<std::int32_t> prompt_tokens(const TraceRequest& request, std::int64_t index) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(static_cast<std::size_t>(request.total_length()));
  for (std::int64_t i = 0; i < request.input_length; ++i) {
    tokens.push_back(
        request.hash_ids.empty()
            ? token_of(Sequence::prompt, static_cast<std::uint64_t>(index), i)
            : token_of(Sequence::hash_id,
                       request.hash_ids[static_cast<std::size_t>(i / kTokensPerHashId)],
                       i % kTokensPerHashId));
  }
  return tokens;
}

std::int32_t generated_token(std::int64_t index, std::int64_t position) {
  return token_of(Sequence::answer, static_cast<std::uint64_t>(index), position);
}

SyntheticRows::SyntheticRows(DType dtype, std::int64_t max_width)
    : element_size_(size_of(dtype)), max_width_(max_width) {
  const std::int64_t count = kNumStarts + max_width;
  for (Table* table : {&normal_, &doubled_}) {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal(0.0F, table == &normal_ ? 1.0F : 2.0F);
    table->numbers.resize(static_cast<std::size_t>(count));
    table->bytes.resize(static_cast<std::size_t>(count * element_size_));
    for (std::int64_t i = 0; i < count; ++i) {
      store_element(table->bytes.data(), dtype, i, normal(engine));
      table->numbers[static_cast<std::size_t>(i)] = load_element(table->bytes.data(), dtype, i);
    }
  }
}

std::int64_t SyntheticRows::row_start(Role role, std::int32_t token) {
  const std::uint64_t key =
      (static_cast<std::uint64_t>(role) << 32) + static_cast<std::uint32_t>(token);
  return static_cast<std::int64_t>(scrambled(key + 0x9e3779b97f4a7c15ULL) % kNumStarts);
}

void SyntheticRows::copy_row(Role role, std::int32_t token, std::int64_t width,
                             std::byte* to) const {
  check(width <= max_width_, "width is {}, rows have at most {} numbers", width, max_width_);
  std::memcpy(to, table(role).bytes.data() + row_start(role, token) * element_size_,
              static_cast<std::size_t>(width * element_size_));
}

std::span<const double> SyntheticRows::numbers(Role role, std::int32_t token, std::int64_t first,
                                               std::int64_t count) const {
  check(first + count <= max_width_, "numbers end at {}, rows have at most {}", first + count,
        max_width_);
  return std::span(table(role).numbers)
      .subspan(static_cast<std::size_t>(row_start(role, token) + first),
               static_cast<std::size_t>(count));
}

}  // namespace foveal::replay
