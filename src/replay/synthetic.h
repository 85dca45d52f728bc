#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "foveal/dtype.h"
#include "replay/trace.h"

// Tokens and tensors of a replay: all a function of the trace, so that what a row must come out as
// is known without having kept anything.
namespace foveal::replay {

/// The prompt of the trace's request of this index. Tokens of a hash id depend on it and on the
/// place in its block only, so equal ids are equal tokens; without hash ids no two prompts begin
/// alike.
std::vector<std::int32_t> prompt_tokens(const TraceRequest& request, std::int64_t index);
/// What the request "generates" as its `position`-th token.
std::int32_t generated_token(std::int64_t index, std::int64_t position);

/// Rows of query, key and value, by token: cut out of a table of normally distributed numbers, at a
/// place that the token decides. Queries are twice as long, so that scores differ enough for a soft
/// cap, and a wrong key, to be seen in the output.
class SyntheticRows {
 public:
  enum class Role : std::uint8_t { query, key, value };

  /// Rows have at most `max_width` numbers of this dtype.
  SyntheticRows(DType dtype, std::int64_t max_width);

  /// Copies the token's row of `width` numbers, in the dtype.
  void copy_row(Role role, std::int32_t token, std::int64_t width, std::byte* to) const;
  /// Numbers [first, first + count) of the token's row.
  std::span<const double> numbers(Role role, std::int32_t token, std::int64_t first,
                                  std::int64_t count) const;

 private:
  struct Table {
    std::vector<double> numbers;
    std::vector<std::byte> bytes;  ///< The same, in the dtype.
  };

  const Table& table(Role role) const { return role == Role::query ? doubled_ : normal_; }
  static std::int64_t row_start(Role role, std::int32_t token);

  std::int64_t element_size_;
  std::int64_t max_width_;
  Table normal_;
  Table doubled_;
};

}  // namespace foveal::replay
