"""The data of 04_parameter_server.py, and how much of the table a step touches."""

import numpy as np

import aiograd as ag

BATCH, BAG = 64, 8


def batch(rng, rows):
    """Bags of ids, few of them frequent and most of them rare. Every other id is a good one."""
    rank = rng.zipf(1.3, (BATCH, BAG)) % rows
    return rank * 7919 % rows, ((rank % 2 == 0).mean(axis=1) > 0.5).astype(np.float32)


async def bytes_of_gradient(table, ctx):
    """Bytes of a table's gradient in a context: of the rows that were touched, at every shard."""
    shards = [(shard.on, shard.module_rref) for shard in table.shards]
    return sum([await ag.rpc_async(on, _bytes_here, args=(s, ctx.id)) for on, s in shards])


def _bytes_here(shard, ctx_id):
    gradient = ag.get_gradients(ctx_id)[shard.local_value().weight]
    return gradient.indices().data.nbytes + gradient.values().data.nbytes
