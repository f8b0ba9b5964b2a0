"""Run exported early-exit models with ONNX Runtime and NumPy, without PyTorch.

`export` writes a folder from a PyTorch model and is the only function here that needs PyTorch.
`EarlyExit.load` runs the folder.
"""

try:
    import onnxruntime as _onnxruntime  # noqa: F401
except ImportError:
    raise ImportError("swiftsure.onnx needs ONNX Runtime: pip install 'swiftsure[onnx]'.") from None

from typing import TYPE_CHECKING, Any

from swiftsure.onnx.audit import Audit, Auditor
from swiftsure.onnx.folder import Manifest, save_policy
from swiftsure.onnx.results import ExitOutput, StreamResult
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.single_file import write_single_file
from swiftsure.onnx.stages import Stages
from swiftsure.onnx.stream import Stream
from swiftsure.run.streaming import StreamError

if TYPE_CHECKING:
    from swiftsure.onnx.collecting import collect
    from swiftsure.onnx.exporting import ExportError, export

__all__ = [
    "Audit",
    "Auditor",
    "EarlyExit",
    "ExitOutput",
    "ExportError",
    "Manifest",
    "Stages",
    "Stream",
    "StreamError",
    "StreamResult",
    "collect",
    "export",
    "save_policy",
    "write_single_file",
]


def __getattr__(name: str) -> Any:
    """Return a function that needs PyTorch, imported when it is asked for."""
    if name == "collect":
        from swiftsure.onnx.collecting import collect

        return collect
    if name in ("ExportError", "export"):
        from swiftsure.onnx import exporting

        return getattr(exporting, name)
    raise AttributeError(f"module 'swiftsure.onnx' has no attribute {name!r}")
