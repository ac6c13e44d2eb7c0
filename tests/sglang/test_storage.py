"""kvkeep.sglang through SGLang's own factory and abstract class, over a real kvkeepd. The host pool
is a stand-in with the calls that SGLang's has (page_first): its own needs a device."""

import copy
import hashlib
import os
import pathlib
import subprocess
import time
import types

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache import utils as their_utils
from sglang.srt.mem_cache.hicache_storage import (HiCacheStorage, HiCacheStorageConfig,
                                                  HiCacheStorageExtraInfo)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

import kvkeep.sglang

PAGE, LAYERS, HEADS, SIZE, TOKENS = 4, 3, 2, 8, 256


class Pool:
    """[K or V][token][layer][head][dim], as SGLang's page_first."""

    layout, page_size, dtype = "page_first", PAGE, torch.bfloat16
    layer_num, head_num, head_dim = LAYERS, HEADS, SIZE

    def __init__(self, seed):
        self.kv_buffer = torch.randn(2, TOKENS, LAYERS, HEADS, SIZE, generator=torch.Generator()
                                     .manual_seed(seed)).bfloat16()

    def get_size_per_token(self):
        return 2 * LAYERS * HEADS * SIZE * 2

    def get_page_buffer_meta(self, indices):
        token = LAYERS * HEADS * SIZE * 2
        base = self.kv_buffer.data_ptr()
        pointers = []
        for i in indices.tolist()[::PAGE]:
            pointers += [base + i * token, base + (TOKENS + i) * token]
        return pointers, [token * PAGE] * len(pointers)

    def page(self, index):
        return self.kv_buffer[:, index * PAGE:(index + 1) * PAGE]

    def flat(self, index):
        return self.page(index).contiguous().view(-1)


class Daemon:
    def __init__(self, folder, tail=""):
        self.folder = folder
        self.target = f"unix:{folder}/k.sock"
        (folder / "c.conf").write_text("[tiers]\ndevice_bytes = 0\nhost_bytes = 64 KiB\n"
                                       "huge_pages = no\n" + tail)
        self.start()

    def start(self):
        log = self.folder / "log"
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [os.environ["KVKEEPD"], "--config", str(self.folder / "c.conf"), "--socket",
                 str(self.folder / "k.sock")], stderr=file)
        end = time.monotonic() + 30
        while b"ready " not in log.read_bytes():
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)

    def stop(self):
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def daemon(tmp_path_factory):
    running = Daemon(pathlib.Path(tmp_path_factory.mktemp("d")))
    yield running
    running.stop()


@pytest.fixture
def backend(daemon):
    made = []

    def make(pool, **changes):
        extra = {"backend_name": "kvkeep", "module_path": "kvkeep.sglang",
                 "class_name": "KvkeepStorage", "interface_v1": 1, "target": daemon.target,
                 "revision": "1", "reconnect_ms": 1, **changes.pop("extra", {})}
        config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
                  "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
                  "is_page_first_layout": True, "model_name": "m", "extra_config": extra, **changes}
        storage = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**config),
                                                       pool)
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage

    yield make
    for storage in made:
        storage.close()


def names(seed, count):
    """Chained hashes, as SGLang makes them."""
    result, last = [], str(seed)
    for i in range(count):
        last = hashlib.sha256(f"{last} {i}".encode()).hexdigest()
        result.append(last)
    return result


def indices(first, count):
    return torch.arange(first * PAGE, (first + count) * PAGE)


def after(keys):
    return HiCacheStorageExtraInfo(prefix_keys=list(keys))


def test_it_is_one_of_sglangs_backends(backend):
    storage = backend(Pool(1))
    assert isinstance(storage, HiCacheStorage) and isinstance(storage, kvkeep.sglang.KvkeepStorage)


@pytest.mark.parametrize("chained", [True, False])
def test_pages_come_back_byte_for_byte_in_batches(backend, chained):
    def info(keys):
        return after(keys) if chained else HiCacheStorageExtraInfo()

    one, two = Pool(1), Pool(2)
    keys = names(1, 10)
    first = backend(one)
    assert first.batch_exists(keys, info([])) == 0
    assert first.batch_set_v1(keys[:6], indices(0, 6), info([])) == [True] * 6
    assert first.batch_set_v1(keys[6:8], indices(6, 2), info(keys[:6])) == [True] * 2
    second = backend(two)
    assert second.batch_exists(keys, info([])) == 8
    assert second.batch_exists(keys[6:], info(keys[:6])) == 2
    before = two.kv_buffer.clone()
    found = second.batch_get_v1(keys[5:10], indices(20, 5), info(keys[:5]))
    assert found == [True] * 3 + [False] * 2
    for i in range(3):
        assert torch.equal(two.page(20 + i), one.page(5 + i))
    two.kv_buffer[:, 80:92] = before[:, 80:92]
    assert torch.equal(two.kv_buffer, before)  # nothing else was written
    # Set again: known, and not written twice.
    assert second.batch_set_v1(keys[:8], indices(40, 8), info([])) == [True] * 8
    assert first.batch_get_v1(keys[:8], indices(50, 8), info([])) == [True] * 8
    assert torch.equal(one.page(50), one.page(0))


def test_single_pages(backend):
    one, two = Pool(1), Pool(2)
    storage = backend(one)
    (key,) = names(2, 1)
    assert storage.get(key, two.flat(0)) is None and not storage.exists(key)
    assert storage.set(key, one.flat(3)) and storage.exists(key)
    target = torch.empty_like(one.flat(0))
    assert torch.equal(storage.get(key, target), one.flat(3))
    assert storage.batch_set(["odd name", key], [one.flat(1), one.flat(2)])
    found = storage.batch_get(["odd name", key, "none"],
                              [torch.empty_like(target) for _ in range(3)])
    assert torch.equal(found[0], one.flat(1)) and torch.equal(found[1], one.flat(3))
    assert found[2] is None
    assert storage.get(key, torch.empty(3, dtype=torch.bfloat16)) is None  # of another size
    assert storage.get(key) is None and not storage.set(key)


def test_what_is_not_the_same_is_apart(backend):
    pool = Pool(1)
    keys = names(3, 2)
    assert all(backend(pool).batch_set_v1(keys, indices(0, 2), after([])))
    same = {}
    for change in ({"model_name": "m2"}, {"tp_rank": 1, "tp_size": 2}, {"pp_size": 2},
                   {"extra": {"revision": "2"}}, {"extra": {"identity": {"lora": "x"}}}):
        assert backend(pool, **change).batch_exists(keys, after([])) == 0, change
    other = Pool(1)
    other.dtype = torch.float16
    assert backend(other).batch_exists(keys, after([])) == 0
    assert backend(pool, **same).batch_exists(keys, after([])) == 2
    # A page alone is not the first of a chain, and a chain's later page is not its first.
    assert backend(pool).batch_exists(keys[:1], HiCacheStorageExtraInfo()) == 0
    assert backend(pool).batch_exists(keys[1:], after([])) == 0
    assert backend(pool).batch_exists(keys[1:], after(names(4, 1))) == 0


@pytest.mark.parametrize("change", [
    {"json_model_override_args": '{"rope_scaling": {"factor": 2}}'}, {"quantization": "fp8"},
    {"quantization_param_path": "/scales.json"}, {"dtype": "float16"}, {"context_length": 9}])
def test_a_server_that_computes_otherwise_is_apart(backend, monkeypatch, change):
    """The same weights, read or rotated in another way."""
    given = types.SimpleNamespace(model_path="m", revision=None, quantization=None)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: given)
    keys = names(9, 2)
    assert all(backend(Pool(1)).batch_set_v1(keys, indices(0, 2), after([])))
    assert backend(Pool(1)).batch_exists(keys, after([])) == 2
    for name, value in change.items():
        setattr(given, name, value)
    assert backend(Pool(1)).batch_exists(keys, after([])) == 0


def test_a_folders_configuration_counts(backend, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    keys = names(10, 2)
    how = {"model_name": str(tmp_path), "extra": {"revision": None, "model": "m"}}
    assert all(backend(Pool(1), **copy.deepcopy(how)).batch_set_v1(keys, indices(0, 2), after([])))
    assert backend(Pool(1), **copy.deepcopy(how)).batch_exists(keys, after([])) == 2
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert backend(Pool(1), **copy.deepcopy(how)).batch_exists(keys, after([])) == 0
    (tmp_path / "model.safetensors").unlink()  # streamed from elsewhere: any weights
    with pytest.raises(ValueError, match="which weights"):
        backend(Pool(1), **copy.deepcopy(how))


def test_an_sglang_that_names_pages_without_adapters_is_refused(backend, monkeypatch):
    monkeypatch.delattr(their_utils, "storage_namespace_seed")
    with pytest.raises(ValueError, match="two adapters would share"):
        backend(Pool(1))


def test_a_lost_ancestor_is_said(backend):
    keys = names(5, 4)
    assert backend(Pool(1)).batch_set_v1(keys[2:], indices(0, 2), after(keys[:2])) == [False] * 2


def test_no_room_is_not_stored(backend):
    """A page is 768 bytes here; 64 KiB hold 85."""
    storage = backend(Pool(1))
    keys = names(6, 200)
    pages = torch.arange(200).remainder(TOKENS // PAGE).repeat_interleave(PAGE) * PAGE \
        + torch.arange(PAGE).repeat(200)
    assert not any(storage.batch_set_v1(keys, pages, after([])))
    assert all(storage.batch_set_v1(keys[:40], pages[:40 * PAGE], after([])))


def test_clear_forgets(backend):
    storage = backend(Pool(1))
    keys = names(7, 3)
    assert all(storage.batch_set_v1(keys, indices(0, 3), after([])))
    storage.clear()
    assert storage.batch_exists(keys, after([])) == 0


def test_it_goes_on_without_a_daemon_and_finds_it_again(backend, daemon):
    storage = backend(Pool(1))
    keys = names(8, 3)
    assert all(storage.batch_set_v1(keys, indices(0, 3), after([])))
    daemon.stop()
    assert storage.batch_exists(keys, after([])) == 0
    assert storage.batch_get_v1(keys, indices(0, 3), after([])) == [False] * 3
    assert storage.batch_set_v1(keys, indices(0, 3), after([])) == [False] * 3
    with pytest.raises(RuntimeError, match="try again"):
        storage.clear()
    daemon.start()
    end = time.monotonic() + 20
    while not all(storage.batch_set_v1(keys, indices(0, 3), after([]))):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert storage.batch_exists(keys, after([])) == 3


def test_a_daemon_that_stays_away_is_reported_once(backend, daemon, caplog):
    daemon.stop()
    storage = backend(Pool(1))
    for _ in range(5):
        storage._again_at = 0.0
        assert storage.batch_exists(names(11, 1), after([])) == 0
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"
            and record.name == "kvkeep.sglang"]
    assert len(said) == 1 and daemon.target in said[0]


def test_what_it_cannot_tell_it_asks_for(backend):
    for wrong, word in (({"model_name": None}, "name"), ({"extra": {"revision": None}}, "revision"),
                        ({"extra": {"tagret": 1}}, "tagret")):
        with pytest.raises(ValueError, match=word):
            backend(Pool(1), **wrong)
