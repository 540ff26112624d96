"""One BLAS thread, also where numpy was loaded before this package could ask for it."""

import ctypes
import glob
import os

import numpy as np


def single_threaded_blas() -> None:
    directory = os.path.dirname(np.__file__)
    for path in glob.glob(os.path.join(directory, "..", "numpy.libs", "*openblas*")):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            function = getattr(library, name, None)
            if function is not None:
                function(1)
                return
