"""A connector of somebody else's, that does nothing but shake hands in a way of its own."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole)


@dataclasses.dataclass
class Greeting(KVConnectorHandshakeMetadata):
    word: str


class OtherConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.greeted = role == KVConnectorRole.WORKER

    def get_handshake_metadata(self):
        return Greeting("hello")

    def set_xfer_handshake_metadata(self, metadata):
        self.greeted = all(isinstance(one, Greeting) for one in metadata.values())

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        assert self.greeted
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass
