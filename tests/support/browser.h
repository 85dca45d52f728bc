#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

// Pages of foveal_report in a real browser: Chromium without a window, where it is installed.
namespace foveal::testing {

inline bool has_browser() { return std::system("command -v chromium >/dev/null 2>&1") == 0; }

struct Screen {
  int width = 1280;
  bool dark = false;
};

/// What Chromium made of a page.
struct Rendered {
  nlohmann::json problems{};    ///< Sentences; empty when all is well.
  nlohmann::json table_rows{};  ///< The text of each row of cells, spaces between cells.
  std::int64_t plots = 0;
  std::int64_t bars_and_marks = 0;
  std::string background{};
};

/// Runs in the page when it is there, and leaves what it found as text at its end.
inline constexpr const char* kProbe = R"(<script>
const problems = [];
addEventListener('error', event => problems.push('script: ' + event.message));
addEventListener('load', () => {
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    problems.push(`the page is ${root.scrollWidth} wide on a screen of ${root.clientWidth}`);
  }
  for (const entry of performance.getEntriesByType('resource')) problems.push('loads ' + entry.name);
  const light = color => color.match(/[\d.]+/g).slice(0, 3).reduce((sum, part) => sum + +part, 0);
  const background = getComputedStyle(document.body).backgroundColor;
  const plots = [...document.querySelectorAll('svg')];
  for (const plot of plots) {
    const name = plot.getAttribute('aria-label');
    const frame = plot.getBoundingClientRect();
    if (frame.width < 100 || frame.height < 30) problems.push(`'${name}' is not to be seen`);
    const outside = box => box.left < frame.left - 1 || box.right > frame.right + 1 ||
                           box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    const texts = [...plot.querySelectorAll('text')];
    texts.forEach((text, i) => {
      const box = text.getBoundingClientRect();
      if (outside(box)) problems.push(`'${name}': '${text.textContent}' is cut off`);
      if (Math.abs(light(getComputedStyle(text).fill) - light(background)) < 150) {
        problems.push(`'${name}': '${text.textContent}' has the colour of the page`);
      }
      for (const other of texts.slice(i + 1)) {
        const that = other.getBoundingClientRect();
        const slack = box.height * 0.25;
        if (box.left < that.right - 1 && that.left < box.right - 1 &&
            box.top < that.bottom - slack && that.top < box.bottom - slack) {
          problems.push(`'${name}': '${text.textContent}' lies on '${other.textContent}'`);
        }
      }
    });
    for (const shape of plot.querySelectorAll('rect, circle, line, polyline')) {
      const box = shape.getBoundingClientRect();
      if (outside(box)) problems.push(`'${name}': a ${shape.tagName} is cut off`);
      for (const colour of ['fill', 'stroke']) {
        const variable = (shape.getAttribute(colour) || '').match(/var\((.*)\)/);
        if (variable && !getComputedStyle(root).getPropertyValue(variable[1])) {
          problems.push(`'${name}': there is no colour ${variable[1]}`);
        }
      }
    }
  }
  const rows = [...document.querySelectorAll('table tr')].map(row =>
      [...row.querySelectorAll('td')].map(cell => cell.textContent).join(' ')).filter(text => text);
  const found = document.createElement('pre');
  found.textContent = 'PROBE' + JSON.stringify({problems, rows, plots: plots.length, background,
      bars_and_marks: document.querySelectorAll('svg rect, svg circle').length}) + 'EBORP';
  document.body.append(found);
});
</script>)";

inline Rendered render(const std::string& page, const Screen& screen) {
  namespace fs = std::filesystem;
  std::string folder = (fs::temp_directory_path() / "foveal-page-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) {
    throw std::runtime_error("no folder for the browser");
  }
  // Before all else, so that it hears of errors.
  std::string probed = page;
  probed.insert(probed.find("<head>") + 6, kProbe);
  std::ofstream(folder + "/page.html") << probed;
  const std::string command = fmt::format(
      "timeout 120 chromium --headless --no-sandbox --disable-gpu --user-data-dir={0}/profile "
      "--blink-settings=preferredColorScheme={1} --window-size={2},900 --dump-dom "
      "file://{0}/page.html 2>/dev/null",
      folder, screen.dark ? 0 : 1, screen.width);
  std::string dom;
  if (FILE* pipe = popen(command.c_str(), "r"); pipe != nullptr) {
    char piece[4096];
    for (std::size_t count = 0; (count = fread(piece, 1, sizeof(piece), pipe)) > 0;) {
      dom.append(piece, count);
    }
    pclose(pipe);
  }
  fs::remove_all(folder);
  const std::size_t end = dom.rfind("EBORP");
  const std::size_t begin = dom.rfind("PROBE", end);
  if (begin == std::string::npos || end == std::string::npos) {
    throw std::runtime_error("the browser said nothing of the page: " + dom.substr(0, 1000));
  }
  std::string found = dom.substr(begin + 5, end - begin - 5);
  for (const auto& [entity, character] :
       {std::pair("&lt;", "<"), {"&gt;", ">"}, {"&nbsp;", " "}, {"&amp;", "&"}}) {
    for (std::size_t at = 0; (at = found.find(entity, at)) != std::string::npos; ++at) {
      found.replace(at, std::string_view(entity).size(), character);
    }
  }
  const nlohmann::json probe = nlohmann::json::parse(found);
  return {.problems = probe.at("problems"),
          .table_rows = probe.at("rows"),
          .plots = probe.at("plots"),
          .bars_and_marks = probe.at("bars_and_marks"),
          .background = probe.at("background")};
}

/// On a large screen and on a telephone, light and dark.
inline Rendered expect_readable(const std::string& page) {
  Rendered large;
  for (const Screen& screen :
       {Screen{400, false}, Screen{400, true}, Screen{1280, true}, Screen{}}) {
    SCOPED_TRACE(fmt::format("{} wide, {}", screen.width, screen.dark ? "dark" : "light"));
    large = render(page, screen);
    EXPECT_TRUE(large.problems.empty()) << large.problems.dump(2);
    EXPECT_TRUE(screen.dark == (large.background != "rgb(255, 255, 255)")) << large.background;
  }
  return large;
}

}  // namespace foveal::testing
