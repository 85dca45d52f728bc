#include "report/html.h"

#include <fmt/format.h>

namespace foveal::report {
namespace {

/// Plots take their colours from here: --s0, --s1, … are the series'.
constexpr std::string_view kStyle = R"(
:root { --ink: #1b1f24; --soft: #667080; --line: #d5dae1; --paper: #ffffff; --s0: #2266cc; --s1: #d1600f; --s2: #20855a;
  --s3: #9b3fb5; --s4: #b8860b; --s5: #c22f55; --s6: #0e8a9c; --s7: #7a5c3e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #97a1af; --line: #39414d; --paper: #14181d;
  --s0: #6ba4ff; --s1: #ff9a4d; --s2: #55c796; --s3: #cf86e5; --s4: #e0b84a; --s5: #ff7d9c;
  --s6: #4fd0df; --s7: #c9a27a; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p { overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.5rem 0; }
.figures b { display: block; font-size: 1.6rem; line-height: 1.2; } .figures span { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } th, td { white-space: nowrap; } td:last-child { white-space: normal; } .n { text-align: right; }
svg { width: 100%; max-width: 62rem; height: auto; } p { max-width: 62rem; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
)";

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string table(const std::vector<Column>& columns,
                  const std::vector<std::vector<std::string>>& rows) {
  const auto alignment = [&](std::size_t column) {
    return columns[column].numbers ? " class=\"n\"" : "";
  };
  std::string html = "<div class=\"wide\"><table>\n<tr>";
  for (std::size_t i = 0; i < columns.size(); ++i) {
    html += fmt::format("<th{}>{}</th>", alignment(i), escaped(columns[i].name));
  }
  html += "</tr>\n";
  for (const std::vector<std::string>& row : rows) {
    html += "<tr>";
    for (std::size_t i = 0; i < columns.size(); ++i) {
      html += fmt::format("<td{}>{}</td>", alignment(i), escaped(row.at(i)));
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string figures(const std::vector<std::pair<std::string, std::string>>& value_and_name) {
  std::string html = "<div class=\"figures\">\n";
  for (const auto& [value, name] : value_and_name) {
    html += fmt::format("<div><b>{}</b><span>{}</span></div>\n", escaped(value), escaped(name));
  }
  return html + "</div>\n";
}

std::string page(std::string_view title, std::string_view body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n{2}</body>\n</html>",
      escaped(title), kStyle, body);
}

}  // namespace foveal::report
