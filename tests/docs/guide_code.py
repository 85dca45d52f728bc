"""Whether the code in a guide is that of files: its blocks of a language, with an empty line between, are the files, one behind the other.

    guide_code.py GUIDE LANGUAGE FILE…
"""

import difflib
import pathlib
import re
import sys

guide, language, *files = sys.argv[1:]
blocks = re.findall(rf"^```{language}\n(.*?)^```$", pathlib.Path(guide).read_text(), re.M | re.S)
in_guide = "\n".join(blocks)
in_files = "\n".join(pathlib.Path(file).read_text() for file in files)
if in_guide != in_files:
    sys.stdout.writelines(difflib.unified_diff(in_files.splitlines(True), in_guide.splitlines(True), " and ".join(files), guide))
    sys.exit(f"the code in {guide} is not that of {' and '.join(files)}")
