#!/usr/bin/env python3
"""The first inputs of the fuzz targets whose inputs have a form: well-formed calls to every method,
configuration files, conversations on the side socket and with a remote store.

    tests/fuzz/seeds.py FOLDER      writes FOLDER/TARGET/NAME
"""

import pathlib
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field, value):
    return varint(field << 3) + varint(value)


def data(field, value):
    return varint(field << 3 | 2) + varint(len(value)) + value


def tokens(*values):
    return struct.pack(f"<{len(values)}I", *values)


def step(what, message=b""):
    return bytes([what]) + struct.pack("<H", len(message)) + message


def method_numbers():
    """Methods by name, numbered as in the table of daemon/rpc.c."""
    text = (ROOT / "daemon/rpc.c").read_text()
    table = text[text.index("kvk_rpc_method methods[] = {"):]
    table = table[:table.index("\n};")]
    names = re.findall(r"(?:CALL|STREAM)\(\w+, (\w+),", table)
    return {name: index for index, name in enumerate(names)}


# The session, the space and what is open when an input begins: see furnish() in rpc_handlers.c.
SPACE, SESSION, SEQUENCE, LEASE = 1, 7, 4, 5
GROUP = (number(1, 1) + number(2, 1) + number(3, 8) + number(4, 8) + number(5, 1) + number(6, 1) +
         number(7, 1) + number(8, 1))


def calls(session):
    prompt = data(1, tokens(*range(1, 11))) + data(2, b"salt") + data(
        3, number(1, 2) + number(2, 3) + data(3, b"digest"))
    plain = data(1, tokens(*range(1, 11)))
    own = number(1, session)
    both = own + number(2, SEQUENCE)
    return {
        "GetServerInfo": b"",
        "OpenSpace": data(2, data(1, b"other") + data(11, data(1, b"k") + data(2, b"v"))) +
        number(3, 4) + data(4, GROUP) + data(4, GROUP + number(10, 8) + number(11, 4)),
        "Lookup": number(1, SPACE) + data(2, plain) + number(3, 1),
        "Touch": number(1, SPACE) + data(2, prompt),
        "Pin": own + number(2, SPACE) + data(3, plain) + number(5, 1000) + number(7, 1) +
        data(8, b"again"),
        "Renew": own + number(2, LEASE) + number(3, 500),
        "Release": own + data(2, varint(LEASE)),
        "BeginTransfer": own + number(3, LEASE) + number(6, 2),
        "EndTransfer": own + number(2, LEASE + 1),
        "OpenSequence": own + number(2, SPACE) + data(3, b"id") + data(4, prompt) + number(6, 20),
        "GetSequence": both,
        "Append": both + number(3, 10) + data(4, tokens(11, 12, 13)) + number(5, 1),
        "Seal": both + number(3, 10) + number(4, 10) + number(5, 1),
        "Commit": both + number(3, 13) + number(4, 1),
        "Truncate": both + number(3, 10) + number(4, 6),
        "Fork": both + number(3, 10) + number(4, 2) + data(5, b"f"),
        "SwapOut": both,
        "SwapIn": both,
        "Close": own + data(2, varint(SEQUENCE)),
        "WriteBlocks": both + data(3, number(3, 2) + data(5, bytes(32))),
        "ReadBlocks": both + number(7, 3),
        "MapMemory": own + number(2, 1) + number(3, SPACE) + number(6, 1),
        "Attend": own + number(5, 1) + number(6, 1) + b"\x3d" + struct.pack("<f", 0.5) +
        number(9, 1) + data(13, number(1, SEQUENCE) + number(3, 9) + number(4, 1) +
                            data(5, data(1, bytes(32)))),
        "Invalidate": number(1, SPACE),
        "Session": data(1, data(4, b"worker")),
        "GetBlock": number(1, SPACE) + data(2, data(1, tokens(1, 2, 3, 4))),
        "TestControl": number(1, 5) + number(5, 1),
    }


def handler_seeds():
    numbers = method_numbers()
    seeds = {}
    for session in (SESSION,):
        made = calls(session)
        for name, index in numbers.items():
            seeds[f"{name}-{session}"] = step(index, made.get(name, b""))
        life = ["Append", "Commit", "Fork", "SwapOut", "Attend", "SwapIn", "Pin", "Truncate",
                "Seal",
                "MapMemory", "BeginTransfer", "EndTransfer", "ReadBlocks", "WriteBlocks",
                "Invalidate", "Lookup", "Close", "GetOccupancy"]
        steps = [step(numbers[name], made.get(name, b"")) for name in life]
        seeds[f"life-{session}"] = b"".join(steps)
        seeds[f"late-{session}"] = (step(0xE0, b"\1") + b"".join(steps[:6]) + step(0xE1, b"\xff") +
                                    step(0xE2, b"\1") + b"".join(steps[6:]) + step(0xF9, b"\1"))
    return seeds


CONFIGURATION = """# everything
[server]
unix_path = /tmp/kvkeep.sock
unix_mode = 0660
tcp_address = [::1]:50051
message_bytes = 64 MiB
drain_ms = 5 s
[tiers]
device_bytes = 1 GiB
host_bytes = 0
huge_pages = no
[cache]
policy = lru
[limits]
tokens = 4096 ; a comment
lease_ms = 10 min
[tenant a]
[tenant "b c"]
[credential engine]
token = 8d0f0c6e2b7a4a559f
tenants = a, b c
[credential operator]
uids = 0, 1000
tenants = a
admin = yes
"""

CONFIG_SEEDS = {
    "whole": CONFIGURATION.encode(),
    "empty": b"\n",
    "no-line-end": b"[tiers]\ndevice_bytes = 1 MiB",
    "quotes": b"[server]\nunix_path = \"/tmp/a b#c;d\"\n",
    "bad-size": b"[tiers]\nhost_bytes = -1 GiB\n",
    "bad-unit": b"[tiers]\nhost_bytes = 1 GB\n",
    "twice": b"[tiers]\nhost_bytes = 1 GiB\nhost_bytes = 2 GiB\n",
    "latin": b"[tenant \xe9]\n",
    "nul": b"[ten\0ant a]\n",
}

# Steps of the target: 0 connect, 1 bind, 2 fetch, 3 send bytes, 4 close, 5 read, 6 map, 7 end.
SIDE_SEEDS = {
    "order": bytes([0, 1, 5, 6, 2, 5, 4]),
    "fetch-twice": bytes([0, 1, 6, 2, 2, 5, 6, 2, 7, 5]),
    "bytes": bytes([0, 3, 16]) + bytes(16) + bytes([8, 11, 3]) + b"abc" + bytes([12]),
    "in-pieces": bytes([0, 1, 3, 1, 0, 3, 15]) + bytes(15) + bytes([6, 2, 5]),
    "crowd": bytes(range(0, 128, 8)) + bytes([1, 6, 2, 9, 10, 7]),
}


def catalogue_seeds():
    """Records of every kind, as catalogue_records.c takes them; checksums are made right there."""
    def record(kind, key, body):
        head = struct.pack("<BBHIQ", kind, 0, 1, 0, 0)
        return bytes([0x80 | kind - 1, len(key)]) + key + head + body

    block = (struct.pack("<Q16s16sQIIfIHHHH", 3, b"k" * 16, b"p" * 16, 1700000000, 0, 5, 1.5, 6, 4,
                         4, 2, 0)
             + struct.pack("<2Q", 7, 8) + tokens(1, 2, 3, 4) + b"extra." + b"salt")
    tenant = (struct.pack("<Q32sQ", 1, b"s" * 32, 1700000000) + struct.pack("<8Q", *range(8))
              + struct.pack("<4IQ4B4x", 1, 2, 3, 4, 5, 1, 2, 1, 0))
    credential = (struct.pack("<4BH2x", 1, 2, 1, 2, 4) + struct.pack("<2Q", 1, 2)
                  + struct.pack("<32s2Q", b"d" * 32, 1, 2) + struct.pack("<2I", 0, 1000) + b"node")
    return {
        "mark": record(1, b"format", struct.pack("<I4x", 1)),
        "tenant": record(2, b"production", tenant),
        "credential": record(3, b"engine", credential),
        "space": record(4, struct.pack(">Q", 9), struct.pack("<QII", 1, 8, 3) + b"identityshp"),
        "generation": record(5, struct.pack(">Q", 9), struct.pack("<Q", 4)),
        "block": record(6, struct.pack(">QII", 9, 1, 77), block),
        "value": record(7, b"boot-id", b"some value"),
        "counter": record(8, b"next-tenant", struct.pack("<Q", 4)),
    }


# Steps of the target, behind its first byte (even: the server): 0 connect, 1 a message of a kind,
# 2 one with a byte changed, 3 raw bytes, 4 close, 5 read, 6 end, 7 put a file.
KEEPER_SEEDS = {
    "life": bytes([0, 1, 1, 0, 7, 1, 7, 2, 1, 4, 0, 1, 4, 1, 5, 1, 3, 1, 5, 4]),
    "two": bytes([0, 1, 1, 0, 8, 9, 1, 0, 7, 1, 13, 12, 4]),
    "strange": bytes([0, 1, 1, 0, 2, 0xC2, 3, 9, 200, 1, 4, 0]),
    "answers": bytes([1, 0x11, 0, 1, 68]) + bytes(4) + b"kvk-7" + bytes(60) + bytes([0, 3, 0, 0]),
    "no-answer": bytes([1, 0x20, 0, 1, 5]) + b"short",
}

# Changes: where, which, at what offset, how many bytes, the bytes. See sidecar.c.
SIDECAR_SEEDS = {
    "header": bytes([0, 0, 60, 4, 1, 0, 0, 0, 5, 0, 0, 0]),
    "processes": bytes([1, 0, 0, 16]) + struct.pack("<QII", 1, 3, 1),
    "words": bytes([2, 1, 0, 8, 2, 3, 0, 0, 0, 0, 0, 0, 3, 2, 0, 8, 1, 0, 0, 0, 0, 0, 0, 0]),
    "moved": bytes([7, 1, 2, 0, 7, 2, 3, 1]),
    "entry": bytes([4, 2, 48, 8, 1, 0, 0, 0, 2, 0, 2, 0, 6, 2, 0, 0]),
}

HTTP_SEEDS = {
    "get": b"\0GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "page": b"\0GET / HTTP/1.0\r\n\r\n",
    "token": b"\0GET /health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n\r\n",
    "post": b"\0POST /api/ListSpaces HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\n\r\n{}",
    "chunked": b"\0POST /api/Doctor HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
               b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "spaces": b"\x07" + b'{"tenant": "default"}',
    "sequences": b"\x09" + b'{"tenant": "", "limit": 3, "after_id": "18446744073709551616"}',
    "why": b"\x0f" + b'{"tenant": "default", "limit": -1}',
    "ratio": b"\x17" + b'{"tenant": "default"}',
    "nested": b"\x05" + b'{"tenant": {"a": [1, 2.5e3, null, true]}}',
}

PLAN_SEEDS = {
    "llama": b'{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, '
             b'"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}',
    "gemma": b'{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", '
             b'"num_hidden_layers": 34, "head_dim": 256, "num_key_value_heads": 4, '
             b'"sliding_window": 1024, "sliding_window_pattern": 6}}',
    "listed": b'{"num_hidden_layers": 3, "num_kv_heads": 1, "head_dim": 8, "sliding_window": 9, '
              b'"layer_types": ["full_attention", "sliding_attention", "mamba"], '
              b'"num_kv_shared_layers": 1}',
    "latent": b'{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, '
              b'"num_nextn_predict_layers": 1, "index_topk": 2048}',
    "t5": b'{"model_type": "t5", "is_encoder_decoder": true, "num_layers": 6, "d_kv": 64, '
          b'"num_heads": 8, "num_decoder_layers": 5}',
    "hybrid": b'{"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": -4, '
              b'"num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32}',
    "falcon": b'{"model_type": "falcon", "multi_query": true, "n_layer": 2, "n_embd": 7, '
              b'"n_head": 3, "v_head_dim": 4, "head_dim": 5}',
}

# Each answer's first byte: 0 it is right, 2 changed, 3 other bytes, 4 cut, 5 twice, 6 slowly from
# now on, 7 elsewhere. See remote_replies.c. The first answers are a greeting's and a map's.
STORE_WORDS = [
    b"$-1\r\n", b"+OK\r\n", b"$0\r\n\r\n", b":5\r\n", b"*0\r\n", b"$12x\r\n", b"$99999999\r\n",
    b"-OOM command not allowed\r\n", b"-CLUSTERDOWN x\r\n", b"-TRYAGAIN x\r\n", b"-NOPERM\r\n",
    b"-LOADING\r\n", b"-WRONGTYPE\r\n", b"-ERR This instance has cluster support disabled\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7001\r\n",
    b"*1\r\n*3\r\n:0\r\n:100\r\n*2\r\n$5\r\nhosty\r\n:7001\r\n",
    b"*1\r\n*3\r\n:5\r\n:3\r\n*2\r\n$1\r\n?\r\n:0\r\n",
]


def store_seeds():
    seeds = {}
    for before in range(0, 24, 2):
        right = bytes(before)
        seeds[f"changed-{before}"] = right + b"\2" + struct.pack("<HB", before * 37, before)
        seeds[f"cut-{before}"] = right + b"\4" + struct.pack("<H", before * 11)
        seeds[f"ended-{before}"] = right + b"\x84" + struct.pack("<H", before * 11)
        seeds[f"twice-{before}"] = right + b"\5"
        seeds[f"slow-{before}"] = right + bytes([6 + 8 * before, before + 1])
        seeds[f"moved-{before}"] = right + bytes([7 + 8 * (before % 8), 135 + 8 * (before % 4)])
        for index, word in enumerate(STORE_WORDS):
            seeds[f"word-{index}-{before}"] = right + bytes([3, len(word)]) + word
    return seeds


def main():
    folder = pathlib.Path(sys.argv[1])
    for target, seeds in (("rpc_handlers", handler_seeds()), ("config", CONFIG_SEEDS),
                          ("side_socket", SIDE_SEEDS),
                          ("catalogue_records", catalogue_seeds()), ("keeper", KEEPER_SEEDS),
                          ("sidecar", SIDECAR_SEEDS), ("http", HTTP_SEEDS),
                          ("plan_config", PLAN_SEEDS), ("remote_replies", store_seeds())):
        place = folder / target
        place.mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (place / name).write_bytes(content)


if __name__ == "__main__":
    main()
