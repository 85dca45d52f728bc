"""vLLM itself is far too large for a test's environment: stand_in/ has what the plug-in imports of it, in its place."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "stand_in"), str(HERE.parent)]
