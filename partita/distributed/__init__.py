"""One head on several machines: every process of a torch.distributed group holds a slice of the keys.

Nothing here starts processes or opens a connection. The caller's process group does, which `torchrun` usually sets up.
"""

from partita.distributed.sharded_head import ShardedHead, shard

__all__ = ["ShardedHead", "shard"]
