#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace foveal::report {

/// Text as it may stand in HTML, in attributes too.
std::string escaped(std::string_view text);

/// A cell is right-aligned where the column is one of numbers.
struct Column {
  std::string name;
  bool numbers = true;
};

/// Everything is escaped.
std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows);

/// A few figures, large, each with what it is below it.
std::string figures(const std::vector<std::pair<std::string, std::string>>& value_and_name);

/// A whole document, readable on light and dark screens, that loads nothing. `body` is HTML.
std::string page(std::string_view title, std::string_view body);

}  // namespace foveal::report
