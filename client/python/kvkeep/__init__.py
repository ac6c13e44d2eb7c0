"""Client of kvkeep, the daemon that keeps the KV cache of language models outside the workers.

    import kvkeep

    with kvkeep.connect() as client, client.session(name="engine") as session:
        space = client.open_space(kvkeep.Identity(model="llama-3.1-8b", revision="…"),
                                  [kvkeep.LayerGroup(layers=32, kv_heads=8, head_size_k=128)])
        memory = session.map_slots(space)
        with session.open_sequence(space, tokens) as sequence:
            for block in sequence.blocks():
                keys, values = memory.array(block)        # [layer][head][token][dim], no copy
                …
            sequence.seal(all_ranks=True)

Tokens are lists, numpy arrays or torch tensors of whole numbers. Refusals are KvkeepError, with the
daemon's typed cause. The API itself is documented in kvkeep/v1/kvkeep.proto.
"""

from kvkeep.client import (Client, Lookup, Retry, Space, Tls, connect, default_target,
                           default_tls)
from kvkeep.errors import Advice, Cause, Code, KvkeepError
from kvkeep.memory import Scratch, SlotMemory
from kvkeep.session import AttendResult, Lease, Sequence, Session, Swap, Transfer
from kvkeep.shapes import (AttendPlace, Attention, ContentSpan, Format, Identity, LayerGroup,
                           Layout, Placement, PrefillCost, PriorityHint, Prompt, Tier, token_bytes)

__version__ = "0.1.0"

__all__ = [
    "Advice", "AttendPlace", "AttendResult", "Attention", "Cause", "Client", "Code", "connect",
    "ContentSpan", "default_target", "default_tls", "Format", "Identity", "KvkeepError",
    "LayerGroup", "Layout", "Lease", "Lookup", "Placement", "PrefillCost", "PriorityHint",
    "Prompt", "Retry", "Scratch", "Sequence", "Session", "SlotMemory", "Space", "Swap", "Tier",
    "Tls", "token_bytes", "Transfer",
]
