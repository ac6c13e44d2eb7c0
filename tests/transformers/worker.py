"""A process of its own for the tests: generates with kvkeep, and says what came out as JSON.

    python worker.py TARGET MODEL PROMPT_TOKENS
"""

import json
import sys

import models
import torch

from kvkeep.transformers import CachedModel


def main():
    target, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = models.build(name, seed=40)
    ids = models.prompt(count, seed=41)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    with CachedModel(model, target=target, block_tokens=4, call_timeout_s=60) as cached:
        got = cached.generate(ids, attention_mask=mask, max_new_tokens=8)
        report = cached.report
    json.dump({"same": got.tolist() == expected.tolist(), "reused": report.reused_tokens,
               "encoder": report.encoder_reused, "why": report.why}, sys.stdout)


if __name__ == "__main__":
    main()
