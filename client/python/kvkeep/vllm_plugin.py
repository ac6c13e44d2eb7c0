"""Tells vLLM of kvkeep's connector, so that its name alone selects it: vLLM loads this by the entry
point "vllm.general_plugins" in each of its processes. Imports nothing heavy."""

from __future__ import annotations

__all__ = ["NAME", "register"]

NAME = "KvkeepConnector"


def register() -> None:
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:  # a vLLM without connectors: nothing to tell it
        return
    try:
        KVConnectorFactory.register_connector(NAME, "kvkeep.vllm", NAME)
    except ValueError:  # it is known
        pass
