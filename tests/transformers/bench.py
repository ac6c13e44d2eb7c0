"""Time to the first token and over an answer, with and without kvkeep, on a model big enough to
matter.

    python bench.py [--tokens 1024] [--rounds 3] [--layers 12] [--hidden 768]

KVKEEPD is the daemon. Prints JSON. Rounds are interleaved: plain, cold (nothing to hit: what
keeping costs), warm. Times are medians, in seconds; `warm_speedup` is plain against warm in the
same run.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time

import conftest
import torch
import transformers

from kvkeep.transformers import CachedModel


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 1024), ("rounds", 3), ("layers", 12), ("hidden", 768),
                          ("answer", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32000, hidden_size=wanted.hidden, num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.hidden // 64, num_key_value_heads=wanted.hidden // 192,
        intermediate_size=wanted.hidden * 8 // 3, max_position_embeddings=8192, eos_token_id=None,
        pad_token_id=0)).eval()
    times = {"plain": [], "cold": [], "warm": []}
    firsts = {"plain": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder:
        daemon = conftest.daemons.Daemon(folder, conftest.TIERS.format(device="0", host="512 MiB"))
        with CachedModel(model, target=daemon.target) as cached:
            began = time.monotonic()
            cached._find_shape()
            identity_s = time.monotonic() - began
            began = time.monotonic()
            cached._find_shape()
            again_s = time.monotonic() - began
            for number in range(wanted.rounds):
                ids = torch.randint(3, 31000, (1, wanted.tokens))
                answers = []
                for kind in ("plain", "cold", "warm"):
                    generate = model.generate if kind == "plain" else cached.generate
                    first = Clock()
                    began = time.monotonic()
                    answers.append(generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=wanted.answer,
                        stopping_criteria=transformers.StoppingCriteriaList([first])).tolist())
                    times[kind].append(time.monotonic() - began)
                    firsts[kind].append(first.at - began)
                assert answers[0] == answers[1] == answers[2], number
                report = cached.report
        daemon.stop()
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    first = {kind: statistics.median(values) for kind, values in firsts.items()}
    json.dump({
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": sum(part.numel() for part in model.parameters()), **vars(wanted),
        "threads": torch.get_num_threads(), "identity_s": identity_s, "identity_again_s": again_s,
        "reused_tokens": report.reused_tokens, "load_s": report.load_s,
        "first_token_s": first, "whole_s": middle,
        "warm_speedup": {"first": first["plain"] / first["warm"],
                         "whole": middle["plain"] / middle["warm"]},
        "cold_cost": {"first": first["cold"] / first["plain"] - 1,
                      "whole": middle["cold"] / middle["plain"] - 1},
        "all": {"first": firsts, "whole": times}}, sys.stdout, indent=1)
    print()


class Clock(transformers.StoppingCriteria):
    """When the first token was there."""

    at = 0.0

    def __call__(self, ids, scores, **_):
        self.at = self.at or time.monotonic()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


if __name__ == "__main__":
    main()
