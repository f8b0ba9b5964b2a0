"""Run the Python blocks of a README as one program, where its path is the first argument."""

import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
exec(compile("\n".join(blocks), sys.argv[1], "exec"), {"__name__": "__main__"})  # noqa: S102 (ours)
