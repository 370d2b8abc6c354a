"""Lets PyPI's torchvision, a CUDA build, be imported beside a CPU build of torch.

Its compiled operators cannot load there, and the import then ends with "operator torchvision::nms does not exist".
Declaring the two schemas first is enough: the transforms that processors of transformers use are plain torch.
`scripts/setup_env.sh` puts this file and a .pth line that imports it into the environment, since every process needs
it, vLLM's own included. It does nothing where torch is a CUDA build or torchvision brings its operators.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

_kept: list[object] = []  # a torch.library.Library withdraws its declarations when it is collected


class _BeforeTorchvision:
    """A finder that finds nothing: it runs once, when torchvision is first looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            if importlib.util.find_spec("torchvision") is not None:
                _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
