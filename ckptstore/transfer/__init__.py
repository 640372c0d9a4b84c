"""Taking weights out of a store and into it: safetensors, ``torch.save`` files, numpy ``.npz``.

Everything streams: neither direction holds more than a few chunks in memory, whatever the size.
"""

from ckptstore.transfer.exporting import export
from ckptstore.transfer.formats import FORMATS
from ckptstore.transfer.importing import import_
from ckptstore.transfer.report import ExportReport, Progress

__all__ = ["FORMATS", "ExportReport", "Progress", "export", "import_"]
