"""An unmodified program as the main module, with the drop-in installed, also in its children.

The program is executed here, in the namespace of this module, and not by `runpy.run_path`: a child
that `multiprocessing` spawns imports the main module of its parent by its name, which is that of
this one. So children install the drop-in, too, before the program's imports run there.
"""

import os
import sys

from aiograd.compat.torch_rpc.install import install

install()
# `runpy` has put this module there, and spawned children have no other way to know.
__file__ = sys.argv[0] = os.environ["AIOGRAD_TORCH_PROGRAM"]
with open(__file__, "rb") as _file:
    exec(compile(_file.read(), __file__, "exec"))
