"""Operations: a forward function, a gradient rule per argument, and nodes on the tape.

    rules         what a gradient rule reads, from its bytecode
    spelling      parameters as torch spells them: dim= for axis=
    signatures    what help() and editors show of an operation
    nodes         recorded operations: what they save, how they are played back
    operation     Op: calling an operation, recorded or not; `ag.op`

A module imports those above it. The operations themselves are rows of the tables in `ops/`.
"""

from __future__ import annotations

from aiograd.autograd.op.operation import OPS as OPS
from aiograd.autograd.op.operation import Op as Op
from aiograd.autograd.op.operation import library_op as library_op
from aiograd.autograd.op.operation import op as op
from aiograd.autograd.op.operation import parent_of as parent_of
from aiograd.autograd.op.operation import result_of as result_of
from aiograd.autograd.op.operation import stacked as stacked
from aiograd.autograd.op.operation import unaliased as unaliased
